"""causal_conv is the oracle's, however the rows of several slots are cut into calls, and after going back."""

from __future__ import annotations

import numpy as np
import pytest
from bits import assert_same_bits
from csrc.steps import Step, cut, one_by_one, replay, step, whole
from leafsum import _C
from machines import machines
from oracle.convolution import causal_convolution
from oracle.inputs import F32, KINDS, numbers

NUM_SLOTS, NUM_ROWS = 4, 150
LENGTHS = {2: 150, 0: 71}
"""By slot; slots 1 and 3 stay unused."""
SHAPES = {"deltanet": (4, 1, 37), "one tap": (1, 1, 16), "ngrams": (4, 3, 70), "far": (3, 5, 1), "wide": (2, 3, 1100)}
"""taps, dilation, channels"""
PLANS = {
    "whole": whole(LENGTHS),
    "one by one": one_by_one(LENGTHS),
    "cut": cut(LENGTHS, (1, 2, 9, 63, 64, 65, 70, 128)),
}


def empty_ring(num_rows: int, num_channels: int) -> F32:
    return np.full((NUM_SLOTS, num_rows, num_channels), np.nan, dtype=np.float32)


def convolved(x: F32, weight: F32, dilation: int, steps: list[Step], ring: F32, outputs: F32) -> F32:
    """x, outputs [slots, T, C] by slot and position; weight [C, taps] as the checkpoint has it."""
    taps = np.ascontiguousarray(weight.T)
    return replay(
        steps, lambda each: _C.causal_conv(x[each.slots, each.positions], taps, dilation, ring, *each.runs), outputs
    )


def expected_of(x: F32, weight: F32, dilation: int) -> F32:
    outputs = np.full_like(x, np.nan)
    for slot, length in LENGTHS.items():
        outputs[slot, :length] = causal_convolution(x[slot, :length], weight, dilation)
    return outputs


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("shape", SHAPES)
def test_convolution(shape: str, plan: str) -> None:
    num_taps, dilation, num_channels = SHAPES[shape]
    x, weight = numbers("x", (NUM_SLOTS, NUM_ROWS, num_channels)), numbers("weight", (num_channels, num_taps))
    expected = expected_of(x, weight, dilation)
    for ring_rows in ((num_taps - 1) * dilation + 1, 128):
        for _ in machines():
            ring = empty_ring(ring_rows, num_channels)
            found = convolved(x, weight, dilation, PLANS[plan], ring, np.full_like(x, np.nan))
            assert_same_bits(found, expected)
            check_ring(ring, x)


def check_ring(ring: F32, x: F32) -> None:
    """The last inputs at their places; everything else as it was."""
    expected = np.full_like(ring, np.nan)
    for slot, length in LENGTHS.items():
        for position in range(length):
            expected[slot, position % ring.shape[1]] = x[slot, position]
    assert_same_bits(ring, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_numbers(kind: str) -> None:
    """Whatever a row holds stays with the rows that it enters."""
    x, weight = numbers("x", (NUM_SLOTS, NUM_ROWS, 19), kind), numbers("weight", (19, 4), "mixed")
    expected = expected_of(x, weight, 2)
    for _ in machines():
        found = convolved(x, weight, 2, PLANS["cut"], empty_ring(128, 19), np.full_like(x, np.nan))
        assert_same_bits(found, expected, any_nan=kind == "special")


@pytest.mark.parametrize("back_to", [86, 100, 149])
def test_going_back(back_to: int) -> None:
    """From row 150 to at most 64 rows before, and on with other rows: as if the first had never been."""
    x, weight = numbers("x", (NUM_SLOTS, NUM_ROWS, 21)), numbers("weight", (21, 4))
    other = x.copy()
    other[:, back_to:] = numbers("other", (NUM_SLOTS, NUM_ROWS - back_to, 21))
    expected = expected_of(other, weight, 3)
    for _ in machines():
        ring = empty_ring(128, 21)
        convolved(x, weight, 3, PLANS["cut"], ring, np.full_like(x, np.nan))
        found = convolved(other, weight, 3, [step((2, back_to, 150))], ring, np.full_like(x, np.nan))
        assert_same_bits(found[2, back_to:], expected[2, back_to:])


def test_no_rows() -> None:
    ring = empty_ring(128, 5)
    none = np.zeros(0, dtype=np.int32)
    x = np.zeros((0, 5), dtype=np.float32)
    assert _C.causal_conv(x, numbers("weight", (4, 5)), 1, ring, none, none, none, none).shape == (0, 5)
    assert np.isnan(ring).all()
