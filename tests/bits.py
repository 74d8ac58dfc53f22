"""Equality of arrays as bit patterns: what every equality test of this project compares by."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def assert_same_bits(actual: Array, expected: Array, *, any_nan: bool = False) -> None:
    """Fails unless both arrays have the same dtype, shape and bits.

    any_nan counts every NaN as the same one: IEEE 754 leaves its sign and payload to the machine.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype, f"dtype: expected {expected.dtype}, found {actual.dtype}"
    assert actual.shape == expected.shape, f"shape: expected {expected.shape}, found {actual.shape}"
    differs = bit_patterns(actual) != bit_patterns(expected)
    if any_nan and actual.dtype.kind == "f":
        differs &= ~(np.isnan(actual) & np.isnan(expected))
    if differs.any():
        raise AssertionError(_difference(actual, expected, differs))


def bit_patterns(array: Array) -> Array:
    """The same array as unsigned integers of the same width."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").reshape(array.shape)


def _difference(actual: Array, expected: Array, differs: Array) -> str:
    first = tuple(int(i) for i in np.argwhere(differs)[0])
    return (
        f"{int(differs.sum())} of {differs.size} elements differ, first at {first}: "
        f"expected {_value(expected, first)}, found {_value(actual, first)}"
    )


def _value(array: Array, index: tuple[int, ...]) -> str:
    pattern = int(bit_patterns(array)[index])
    return f"{array[index]!r} (0x{pattern:0{2 * array.dtype.itemsize}x})"
