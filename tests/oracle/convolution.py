"""The causal convolution of docs/numerics.md sections 6 and 10: every channel by itself, silu included."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oracle.fl32 import fma
from oracle.functions import silu

F32 = NDArray[np.float32]


def causal_convolution(x: F32, weight: F32, dilation: int = 1) -> F32:
    """x [T, C] at positions 0.. of one sequence, weight [C, taps] -> [T, C].

    Row t takes rows t - (taps - 1) * dilation, ..., t - dilation, t, the oldest first; before position 0 all is +0.0.
    """
    num_rows, num_taps = len(x), weight.shape[1]
    total = np.zeros_like(x)
    for tap in range(num_taps):
        distance = min((num_taps - 1 - tap) * dilation, num_rows)
        inputs = np.zeros_like(x)
        inputs[distance:] = x[: num_rows - distance]
        total = fma(inputs, weight[:, tap], total)
    return silu(total)
