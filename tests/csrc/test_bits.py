"""assert_same_bits sees what a comparison of floats does not, and says where."""

from __future__ import annotations

import numpy as np
import pytest
from bits import assert_same_bits
from numpy.typing import NDArray

ZEROS = np.zeros((2, 3), dtype=np.float32)


def with_value(bits: int) -> NDArray[np.float32]:
    array = ZEROS.copy()
    array.view(np.uint32)[1, 2] = bits
    return array


def test_minus_zero_is_named_with_its_place_and_bits() -> None:
    with pytest.raises(AssertionError, match=r"1 of 6 elements differ, first at \(1, 2\): .*0x00000000.*0x80000000"):
        assert_same_bits(with_value(0x80000000), ZEROS)


def test_nan_differs_by_payload_unless_told_otherwise() -> None:
    quiet, other = with_value(0x7FC00000), with_value(0xFFC00001)
    assert_same_bits(quiet, quiet.copy())
    assert_same_bits(quiet, other, any_nan=True)
    with pytest.raises(AssertionError, match="0x7fc00000"):
        assert_same_bits(quiet, other)
    with pytest.raises(AssertionError, match="1 of 6"):
        assert_same_bits(quiet, ZEROS, any_nan=True)


@pytest.mark.parametrize("other", [ZEROS.astype(np.float64), ZEROS.view(np.uint32), ZEROS.T, ZEROS[None], ZEROS[:1]])
def test_type_and_shape_come_first(other: NDArray[np.float32]) -> None:
    with pytest.raises(AssertionError, match=r"dtype|shape"):
        assert_same_bits(other, ZEROS)
