"""RMSNorm of docs/numerics.md section 1."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oracle.fl32 import add, div, mul, sqrt
from oracle.lanes import lane_sum_of_squares

F32 = NDArray[np.float32]


def rms_norm(x: F32, weight: F32, eps: float, one_plus_weight: bool = False) -> F32:
    """x [..., N], weight [N] -> [..., N]; square root and division are two roundings."""
    mean = div(lane_sum_of_squares(x), float(x.shape[-1]))
    r = div(1.0, sqrt(add(mean, eps)))
    scale = add(1.0, weight) if one_plus_weight else weight
    return mul(mul(x, r[..., None]), scale)
