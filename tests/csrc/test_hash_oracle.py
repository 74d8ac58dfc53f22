"""residual_hash is the oracle's, and it tells rows, places and positions apart."""

from __future__ import annotations

import numpy as np
import pytest
from bits import assert_same_bits
from leafsum import _C
from machines import machines
from oracle.hash import residual_hash
from oracle.inputs import KINDS, numbers

POSITIONS = np.array([0, 1, 4095, 2**31 - 1], dtype=np.int32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 16, 77])
def test_residual_hash(kind: str, width: int) -> None:
    x = numbers("x", (len(POSITIONS), width), kind)
    expected = residual_hash(x, POSITIONS)
    for _ in machines():
        assert_same_bits(_C.residual_hash(x, POSITIONS), expected)


def test_every_nan_is_hashed_as_one_pattern() -> None:
    nans = [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF]
    others = [0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x80000000]
    x = numbers("x", (len(nans) + len(others), 77))
    x[:] = x[0]
    x.view(np.uint32)[:, 40] = nans + others
    positions = np.full(len(x), 7, dtype=np.int32)
    expected = residual_hash(x, positions)
    for _ in machines():
        hashes = _C.residual_hash(x, positions)
        assert_same_bits(hashes, expected)
        assert len(set(hashes[: len(nans)].tolist())) == 1
        assert len(set(hashes.tolist())) == 1 + len(others)


def test_one_bit_a_swap_or_another_position_shows() -> None:
    x, position = numbers("x", (1, 32)), np.array([7], dtype=np.int32)
    flipped, swapped = x.copy(), x[:, ::-1].copy()
    flipped.view(np.uint32)[0, 31] ^= 1
    hashes = [_C.residual_hash(row, position)[0] for row in (x, flipped, swapped)]
    hashes.append(_C.residual_hash(x, position + np.int32(1))[0])
    assert len({int(value) for value in hashes}) == 4
