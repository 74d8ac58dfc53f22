"""The lane rule of docs/numerics.md section 1: 64 lanes, each ascending with stride 64, folded by halves."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oracle.fl32 import add, fma

F32 = NDArray[np.float32]

NUM_LANES = 64


def fold(lanes: F32) -> F32:
    """[..., 64] -> [...]: lane l += lane l + h for h = 32, 16, 8, 4, 2, 1; empty lanes take part."""
    half = NUM_LANES // 2
    while half >= 1:
        lanes = add(lanes[..., :half], lanes[..., half : 2 * half])
        half //= 2
    return lanes[..., 0]


def lane_sum(x: F32) -> F32:
    """[..., N] -> [...]."""
    lanes = np.zeros((*x.shape[:-1], NUM_LANES), dtype=np.float32)
    for start in range(0, x.shape[-1], NUM_LANES):
        part = x[..., start : start + NUM_LANES]
        lanes[..., : part.shape[-1]] = add(lanes[..., : part.shape[-1]], part)
    return fold(lanes)


def lane_sum_of_squares(x: F32) -> F32:
    """[..., N] -> [...]; each square enters its lane by fma."""
    return lane_sum_of_products(x, x)


def lane_sum_of_products(x: F32, y: F32) -> F32:
    """x, y [..., N] -> [...]; each product enters its lane by fma."""
    lanes = np.zeros((*x.shape[:-1], NUM_LANES), dtype=np.float32)
    for start in range(0, x.shape[-1], NUM_LANES):
        part, other = (values[..., start : start + NUM_LANES] for values in (x, y))
        lanes[..., : part.shape[-1]] = fma(part, other, lanes[..., : part.shape[-1]])
    return fold(lanes)
