"""The router of docs/numerics.md section 3: softmax over all experts, top-k with ties to the lower id."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oracle.fl32 import add, div, sub
from oracle.functions import exp
from oracle.lanes import lane_sum

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


def softmax(logits: F32) -> F32:
    """One row [E]: the maximum subtracted, exp, the lane sum, each divided."""
    powers = exp(sub(logits, max(float(value) for value in logits)))
    return div(powers, lane_sum(powers))


def route(logits: F32, top_k: int, renormalise: bool) -> tuple[I32, F32]:
    """logits [M, E] -> ids [M, top_k] ascending in a row, and their weights [M, top_k]."""
    rows = [_route_row(row, top_k, renormalise) for row in logits]
    ids = np.array([row_ids for row_ids, _ in rows], dtype=np.int32).reshape(len(rows), top_k)
    weights = np.array([row_weights for _, row_weights in rows], dtype=np.float32).reshape(len(rows), top_k)
    return ids, weights


def _route_row(logits: F32, top_k: int, renormalise: bool) -> tuple[list[int], F32]:
    probabilities = softmax(logits)
    by_rank = sorted(range(len(logits)), key=lambda i: (-float(probabilities[i]), i))
    chosen = sorted(by_rank[:top_k])
    weights = probabilities[chosen]
    if renormalise:
        total = np.zeros((), dtype=np.float32)
        for weight in weights:
            total = add(total, weight)
        weights = div(weights, total)
    return chosen, weights
