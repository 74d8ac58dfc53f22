"""Every instruction set of this machine gives the bits of the plain one."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from csrc.cases import CASES
from leafsum import _C


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = _C.instruction_set()
    yield
    _C.set_instruction_set(before)


def test_the_best_set_is_chosen_and_plain_is_always_there() -> None:
    names = _C.instruction_sets()
    assert _C.instruction_set() == names[0]
    assert names[-1] == "plain"
    for name in names:
        _C.set_instruction_set(name)
        assert _C.instruction_set() == name


@pytest.mark.parametrize("case", CASES)
def test_same_bits(case: str) -> None:
    _C.set_instruction_set("plain")
    expected = CASES[case]()
    for name in _C.instruction_sets()[:-1]:
        _C.set_instruction_set(name)
        assert CASES[case]() == expected, name


def test_kernel_sources_share_no_function_with_the_linker() -> None:
    """A template or inline function of the standard library, compiled for AVX-512, could be kept for every machine."""
    folder = Path(__file__).parents[2] / "csrc" / "cpu"
    sources = [
        *folder.glob("kernels_*.cpp"),
        *folder.glob("*.inc"),
        folder / "kernels.hpp",
        folder / "hard_arguments.hpp",
    ]
    assert len(sources) > 10
    for source in sources:
        text = source.read_text()
        assert "std::" not in text, source.name
        assert set(re.findall(r"#include <(.*)>", text)) <= {"stdint.h", "immintrin.h"}, source.name
