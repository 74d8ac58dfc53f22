"""Hyper-connections of docs/numerics.md section 9: the gates, the row a block reads, and what it writes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oracle.fl32 import add, div, mul
from oracle.functions import sigmoid, silu

F32 = NDArray[np.float32]


def mixer_row(x: F32, num_streams: int) -> F32:
    """x [M, low_rank] of the first narrow linear -> m."""
    return silu(div(x, float(num_streams)))


def injection_weights(z: F32, num_streams: int) -> F32:
    """z [M, S] -> w."""
    return mul(2.0, sigmoid(div(z, float(num_streams))))


def mixed_row(y: F32, normed: F32, num_streams: int) -> F32:
    """y, normed [M, S * H] -> [M, H], what the block reads; y of the narrow linear back to all streams."""
    products = mul(sigmoid(y), normed).reshape(len(y), num_streams, -1)
    total = products[:, 0]
    for stream in range(1, num_streams):
        total = add(total, products[:, stream])
    return div(total, float(num_streams))


def written_streams(streams: F32, output: F32, weights: F32) -> F32:
    """streams [M, S * H], the block's output [M, H], weights [M, S] -> the streams after it."""
    written = mul(output[:, None, :], weights[:, :, None])
    return add(streams, written.reshape(streams.shape))
