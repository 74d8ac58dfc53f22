"""The router is the oracle's: softmax by the lane rule, ties to the lower id, ids ascending."""

from __future__ import annotations

import numpy as np
import pytest
from bits import assert_same_bits
from leafsum import _C
from machines import machines
from oracle.inputs import F32, FINITE_KINDS, numbers
from oracle.router import route


def assert_routes_as_oracle(logits: F32, top_k: int, renormalise: bool) -> None:
    ids, weights = route(logits, top_k, renormalise)
    for _ in machines():
        actual_ids, actual_weights = _C.router(logits, top_k, renormalise)
        assert_same_bits(actual_ids, ids)
        assert_same_bits(actual_weights, weights)


@pytest.mark.parametrize("kind", FINITE_KINDS)
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (5, 5), (8, 1), (64, 8), (65, 3), (130, 10)])
@pytest.mark.parametrize("renormalise", [True, False])
def test_router(kind: str, num_experts: int, top_k: int, renormalise: bool) -> None:
    assert_routes_as_oracle(numbers("logits", (5, num_experts), kind), top_k, renormalise)


@pytest.mark.parametrize("renormalise", [True, False])
def test_all_equal_takes_the_lowest_ids(renormalise: bool) -> None:
    logits = np.full((1, 70), -3.25, dtype=np.float32)
    ids, _ = _C.router(logits, 4, renormalise)
    assert ids.tolist() == [[0, 1, 2, 3]]
    assert_routes_as_oracle(logits, 4, renormalise)


def test_logits_that_differ_may_tie_as_probabilities() -> None:
    """The choice is by FP32 probability: logits too far below the best all have probability +0.0."""
    logits = np.array([[-200.0, -300.0, 5.0, -150.0, -np.inf]], dtype=np.float32)
    assert _C.router(logits, 3, True)[0].tolist() == [[0, 1, 2]]
    assert_routes_as_oracle(logits, 3, True)


def test_close_logits_may_tie_as_probabilities() -> None:
    far = np.float32(-30.0)
    logits = np.array([[0.0, np.nextafter(far, np.float32(-31)), far, 0.0]], dtype=np.float32)
    for top_k in (1, 2, 3):
        assert_routes_as_oracle(logits, top_k, True)


def test_a_row_of_nan_still_gives_ids_in_range_and_harms_no_other() -> None:
    logits = numbers("logits", (3, 20))
    logits[1] = np.nan
    ids, weights = _C.router(logits, 4, True)
    expected_ids, expected_weights = route(logits[[0, 2]], 4, True)
    assert_same_bits(ids[[0, 2]], expected_ids)
    assert_same_bits(weights[[0, 2]], expected_weights)
    assert (np.diff(ids[1]) > 0).all()
    assert ids[1].min() >= 0
    assert ids[1].max() < 20
