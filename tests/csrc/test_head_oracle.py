"""argmax and nonfinite_rows are the oracle's."""

from __future__ import annotations

import numpy as np
import pytest
from bits import assert_same_bits
from leafsum import _C
from machines import machines
from oracle.head import argmax, nonfinite_rows
from oracle.inputs import F32, FINITE_KINDS, KINDS, numbers


def assert_chooses_as_oracle(logits: F32) -> None:
    values, ids = argmax(logits)
    for _ in machines():
        actual_values, actual_ids = _C.argmax(logits)
        assert_same_bits(actual_ids, ids)
        assert_same_bits(actual_values, values, any_nan=True)


@pytest.mark.parametrize("kind", FINITE_KINDS)
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 64, 333])
def test_argmax(kind: str, vocab_size: int) -> None:
    assert_chooses_as_oracle(numbers("logits", (6, vocab_size), kind))


def test_ties_go_to_the_lower_id() -> None:
    logits = np.full((4, 100), -7.0, dtype=np.float32)
    logits[1, [40, 41, 99]] = 2.0
    logits[2] = -np.inf
    logits[3, 8::8] = 0.0
    logits[3, 7] = -0.0
    assert _C.argmax(logits)[1].tolist() == [0, 40, 0, 7]
    assert_chooses_as_oracle(logits)


def test_infinities_and_a_row_of_nan() -> None:
    logits = numbers("logits", (3, 50))
    logits[0, 30:] = np.inf
    logits[1] = np.nan
    assert_chooses_as_oracle(logits)


@pytest.mark.parametrize("place", [0, 63, 64, 130])
def test_one_number_among_nan(place: int) -> None:
    logits = np.full((2, 131), np.nan, dtype=np.float32)
    logits[0, place] = -np.inf
    logits[1, place:] = np.float32(-1e-45)
    for _ in machines():
        values, ids = _C.argmax(logits)
        assert ids.tolist() == [place, place]
        assert_same_bits(values, logits[[0, 1], place])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 16, 41])
def test_nonfinite_rows(kind: str, width: int) -> None:
    x = numbers("x", (12, width), kind)
    expected = nonfinite_rows(x)
    for _ in machines():
        actual = _C.nonfinite_rows(x)
        assert actual.dtype == np.bool_
        assert actual.tolist() == expected.tolist()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 17, 40])
def test_one_value_marks_its_row_alone(value: float, place: int) -> None:
    x = numbers("x", (3, 41))
    x[1, place] = value
    assert _C.nonfinite_rows(x).tolist() == [False, True, False]
