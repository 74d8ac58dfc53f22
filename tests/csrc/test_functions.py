"""Functions of one FP32 argument are correctly rounded: against mpmath, 80 bits, and at every hard argument."""

import importlib.util
import platform
import re
import warnings
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from leafsum import _C

CSRC = Path(__file__).parents[2] / "csrc"
NUM_HARD = {"exp": 7, "log": 48, "sin": 32, "cos": 36, "sigmoid": 355, "softplus": 9}
INFINITY, NAN = 0x7F800000, 0x7FC00000
SPECIAL = {  # argument bits: value bits
    "exp": {
        0: 0x3F800000,
        0x80000000: 0x3F800000,
        INFINITY: INFINITY,
        0xFF800000: 0,
        0x7F7FFFFF: INFINITY,
        0xFF7FFFFF: 0,
    },
    "log": {0: 0xFF800000, 0x80000000: 0xFF800000, 0x3F800000: 0, INFINITY: INFINITY, 0xBF800000: NAN, 0xFF800000: NAN},
    "sin": {0: 0, 0x80000000: 0x80000000, INFINITY: NAN, 0xFF800000: NAN, 1: 1, 0x80000001: 0x80000001},
    "cos": {0: 0x3F800000, 0x80000000: 0x3F800000, INFINITY: NAN, 0xFF800000: NAN, 1: 0x3F800000},
    "sigmoid": {0: 0x3F000000, 0x80000000: 0x3F000000, INFINITY: 0x3F800000, 0xFF800000: 0, 0x7F7FFFFF: 0x3F800000},
    "softplus": {0: 0x3F317218, INFINITY: INFINITY, 0xFF800000: 0, 0x7F7FFFFF: 0x7F7FFFFF, 0xFF7FFFFF: 0},
}


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hard_arguments", CSRC / "tools" / "hard_arguments.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()


def hard_arguments(name: str) -> list[int]:
    text = (CSRC / "cpu" / "hard_arguments.cpp").read_text()
    table = text.split(f"{name.upper()}_ENTRIES[] = {{")[1].split("};")[0]
    return [int(argument, 16) for argument in re.findall(r"\{0x([0-9a-f]{8})u,", table)]


def apply_bits(name: str, arguments: np.ndarray) -> np.ndarray:
    return getattr(_C, name)(arguments.astype(np.uint32).view(np.float32)).view(np.uint32)


def assert_exact(name: str, arguments: list[int]) -> None:
    found = apply_bits(name, np.array(arguments, np.uint32))
    expected = [TOOL.exact(name, argument)[0] for argument in arguments]
    wrong = [(f"{a:08x}", f"{f:08x}", f"{e:08x}") for a, f, e in zip(arguments, found, expected, strict=True) if f != e]
    assert wrong == []


@pytest.mark.parametrize("name", NUM_HARD)
def test_hard_arguments(name: str) -> None:
    arguments = hard_arguments(name)
    assert len(arguments) == NUM_HARD[name]
    assert arguments == sorted(arguments)
    assert_exact(name, arguments)
    if name in ("sin", "cos"):
        assert_exact(name, [argument | 0x80000000 for argument in arguments])


@pytest.mark.parametrize("name", NUM_HARD)
def test_against_mpmath(name: str) -> None:
    finite = np.random.default_rng(1).integers(0, INFINITY, 600)
    ordinary = np.random.default_rng(2).uniform(-20, 20, 600).astype(np.float32).view(np.uint32)
    arguments = np.concatenate([ordinary, finite])
    signs = 0 if name == "log" else np.random.default_rng(3).integers(0, 2, arguments.size) << 31
    arguments = (arguments & 0x7FFFFFFF) | signs
    bounded = arguments[(arguments & 0x7FFFFFFF) < 0x44000000] if name in ("exp", "sigmoid", "softplus") else arguments
    assert_exact(name, [int(argument) for argument in bounded])


@pytest.mark.parametrize("name", ["exp", "sigmoid", "softplus"])
def test_results_near_both_ends_of_the_range(name: str) -> None:
    ends = np.random.default_rng(4).uniform(-104.5, -86.0, 400).astype(np.float32)
    top = np.random.default_rng(5).uniform(87.5, 89.5, 200).astype(np.float32)
    assert_exact(name, [int(bits) for bits in np.concatenate([ends, top]).view(np.uint32)])


@pytest.mark.parametrize("name", NUM_HARD)
def test_special_values(name: str) -> None:
    arguments = np.array(list(SPECIAL[name]), np.uint32)
    expected = np.array(list(SPECIAL[name].values()), np.uint32)
    assert [f"{bits:08x}" for bits in apply_bits(name, arguments)] == [f"{bits:08x}" for bits in expected]
    nans = np.array([0x7F800001, 0x7FC00000, 0xFFC12345, 0xFFFFFFFF], np.uint32)
    assert (apply_bits(name, nans) == NAN).all()


def in_80_bits(name: str, x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.longdouble)
    with np.errstate(all="ignore"):
        if name == "sigmoid":
            return 1 / (1 + np.exp(-wide))
        if name == "softplus":
            return np.where(wide > 0, wide, 0) + np.log1p(np.exp(-np.abs(wide)))
        return getattr(np, name)(wide)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="long double has 80 bits on x86-64 alone")
@pytest.mark.parametrize("name", NUM_HARD)
def test_against_80_bits(name: str) -> None:
    """Every exponent and both signs; arguments that 80 bits cannot settle are left to the tests above."""
    arguments = np.arange(0, 2**32, 8191, dtype=np.uint64).astype(np.uint32)
    arguments = arguments[(arguments & 0x7FFFFFFF) <= INFINITY]
    wide = in_80_bits(name, arguments.view(np.float32))
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # Casts that overflow are meant to.
        low, high = ((wide * (1 + side * np.longdouble(2) ** -58)).astype(np.float32) for side in (-1, 1))
    low, high = low.view(np.uint32), high.view(np.uint32)
    decided = (low == high) & ~np.isnan(wide)
    assert decided[np.isfinite(wide)].mean() > 0.999
    assert (apply_bits(name, arguments)[decided] == low[decided]).all()


@pytest.mark.full
@pytest.mark.skipif(platform.machine() != "x86_64", reason="long double has 80 bits on x86-64 alone")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NUM_HARD)
def test_all_arguments(name: str, tmp_path: Path) -> None:
    """All 2^32, every instruction set: minutes of one core a function."""
    assert TOOL.check(TOOL.build(tmp_path), name)
