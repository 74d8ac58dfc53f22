"""Rotary embedding of docs/numerics.md section 1; frequencies are exact powers rounded once."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from oracle.fl32 import add, mul, sub
from oracle.functions import cos, mp, sin
from oracle.rounding import nearest_f32

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


def frequencies(theta: float, num_rotated: int) -> F32:
    """[num_rotated / 2]: theta^(-2i / num_rotated), the exact value rounded once to FP32."""
    powers = (mp.power(mp.mpf(theta), mp.mpf(-2 * i) / num_rotated) for i in range(num_rotated // 2))
    return np.array([nearest_f32(_fraction(power)) for power in powers], dtype=np.float32)


def _fraction(value: object) -> Fraction:
    sign, significand, exponent, _ = value._mpf_  # type: ignore[attr-defined]
    return Fraction(-1 if sign else 1) * int(significand) * Fraction(2) ** int(exponent)


def rotary(x: F32, positions: I32, frequency: F32, attention_factor: float = 1.0) -> F32:
    """x [M, heads, D], positions [M], frequency [R/2]; x_i of the first R turns with x_(i + R/2), the rest stays."""
    num_pairs = frequency.shape[0]
    # Exact in double below position 2^29: 29 bits times 24; then the one rounding.
    angle = (positions.astype(np.float64)[:, None] * frequency.astype(np.float64)[None, :]).astype(np.float32)
    cosine = mul(cos(angle), attention_factor)[:, None, :]
    sine = mul(sin(angle), attention_factor)[:, None, :]
    first, second = x[..., :num_pairs], x[..., num_pairs : 2 * num_pairs]
    turned = x.copy()
    turned[..., :num_pairs] = sub(mul(first, cosine), mul(second, sine))
    turned[..., num_pairs : 2 * num_pairs] = add(mul(second, cosine), mul(first, sine))
    return turned
