"""rotary is the oracle's."""

from __future__ import annotations

import numpy as np
import pytest
from bits import assert_same_bits
from leafsum import _C
from machines import machines
from oracle.inputs import KINDS, numbers
from oracle.rotary import frequencies, rotary

POSITIONS = np.array([0, 1, 2, 63, 4095, 40959, 1_000_003, 2**24 + 1, 2**29 - 1], dtype=np.int32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("head_dim", "num_rotated"), [(8, 8), (64, 64), (24, 8), (128, 128)])
@pytest.mark.parametrize("attention_factor", [1.0, 1.1386294361119891])
def test_rotary(kind: str, head_dim: int, num_rotated: int, attention_factor: float) -> None:
    x = numbers("x", (len(POSITIONS), 3, head_dim), kind)
    frequency = frequencies(1e6, num_rotated)
    expected = rotary(x, POSITIONS, frequency, attention_factor)
    for _ in machines():
        actual = _C.rotary(x, POSITIONS, frequency, attention_factor)
        assert_same_bits(actual, expected, any_nan=kind == "special")


def test_position_zero_turns_nothing() -> None:
    x = numbers("x", (2, 1, 16))
    assert_same_bits(_C.rotary(x, np.zeros(2, dtype=np.int32), frequencies(1e4, 16), 1.0), x)
