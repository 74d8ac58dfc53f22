"""The machine's settings: threads, instruction sets, and the float environment that the contract needs."""

from __future__ import annotations

import pytest
from leafsum import _C
from machines import THREAD_COUNTS, machine, machines


def test_plain_is_always_there_and_last() -> None:
    assert _C.instruction_sets()[-1] == "plain"
    assert len(set(_C.instruction_sets())) == len(_C.instruction_sets())
    assert _C.instruction_set() in _C.instruction_sets()


def test_settings_are_what_was_set() -> None:
    for instruction_set in _C.instruction_sets():
        for num_threads in THREAD_COUNTS:
            with machine(instruction_set, num_threads):
                assert (_C.instruction_set(), _C.num_threads()) == (instruction_set, num_threads)


def test_subnormals_are_kept_in_every_thread() -> None:
    for _ in machines():
        assert _C.subnormals_kept()


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="plain"):
        _C.set_instruction_set("abacus")
    with pytest.raises(ValueError):
        _C.set_num_threads(0)
