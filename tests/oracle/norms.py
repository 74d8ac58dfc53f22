"""RMSNorm and L2 norm of docs/numerics.md section 1, and DeltaNet's norm with a gate of section 6."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oracle.fl32 import add, div, mul, sqrt
from oracle.functions import sigmoid, silu
from oracle.lanes import lane_sum_of_squares

F32 = NDArray[np.float32]

L2_EPS = 1e-6


def rms_norm(x: F32, weight: F32, eps: float, one_plus_weight: bool = False) -> F32:
    """x [..., N], weight [N] -> [..., N]; square root and division are two roundings.

    x [..., groups, N] with weight [groups, N] is the grouped norm: one norm for each group, with its own weights.
    """
    mean = div(lane_sum_of_squares(x), float(x.shape[-1]))
    r = div(1.0, sqrt(add(mean, eps)))
    scale = add(1.0, weight) if one_plus_weight else weight
    return mul(mul(x, r[..., None]), scale)


def grouped_rms_norm(x: F32, weight: F32, num_groups: int, eps: float, one_plus_weight: bool = False) -> F32:
    """x [M, groups * N], weight [groups * N] -> like x."""
    groups = x.reshape(len(x), num_groups, -1)
    return rms_norm(groups, weight.reshape(num_groups, -1), eps, one_plus_weight).reshape(x.shape)


def l2_norm(x: F32) -> F32:
    """x [..., N] -> [..., N]."""
    r = div(1.0, sqrt(add(lane_sum_of_squares(x), L2_EPS)))
    return mul(x, r[..., None])


def gated_norm(x: F32, gate: F32, weight: F32, eps: float, activation: str) -> F32:
    """x, gate [..., N], weight [N] -> [..., N]: the RMSNorm, then times silu or sigmoid of the gate."""
    act = {"silu": silu, "sigmoid": sigmoid}[activation]
    return mul(rms_norm(x, weight, eps), act(gate))
