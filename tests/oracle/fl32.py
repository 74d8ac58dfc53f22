"""FP32 operations, one rounding each. fma is emulated: exact product, sum rounded to odd, then one rounding."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Values = F32 | np.float32 | float


def f32(x: Values) -> F32:
    """Arrays and numbers as FP32 arrays; a Python number is rounded once."""
    with np.errstate(all="ignore"):
        return np.asarray(x, dtype=np.float32)


def add(x: Values, y: Values) -> F32:
    with np.errstate(all="ignore"):
        return np.asarray(np.add(f32(x), f32(y)))


def sub(x: Values, y: Values) -> F32:
    with np.errstate(all="ignore"):
        return np.asarray(np.subtract(f32(x), f32(y)))


def mul(x: Values, y: Values) -> F32:
    with np.errstate(all="ignore"):
        return np.asarray(np.multiply(f32(x), f32(y)))


def div(x: Values, y: Values) -> F32:
    with np.errstate(all="ignore"):
        return np.asarray(np.divide(f32(x), f32(y)))


def sqrt(x: Values) -> F32:
    with np.errstate(all="ignore"):
        return np.asarray(np.sqrt(f32(x)))


def fma(x: Values, y: Values, z: Values) -> F32:
    """fl32(x * y + z) with one rounding.

    The product of two FP32 values is exact in FP64 (48 bits). Their sum with z, rounded to odd in 53 bits, rounds to
    FP32 as the exact sum would, because 53 >= 24 + 2 (subnormal results have fewer bits still).
    """
    with np.errstate(all="ignore"):
        product = f32(x).astype(np.float64) * f32(y).astype(np.float64)
        addend = f32(z).astype(np.float64)
        return np.asarray(_sum_to_odd(product, addend).astype(np.float32))


def _sum_to_odd(a: F64, b: F64) -> F64:
    total = np.asarray(a + b)
    b_part = total - a
    rest = (a - (total - b_part)) + (b - b_part)  # the exact error of the sum
    even = (total.view(np.int64) & 1) == 0
    inexact = np.isfinite(total) & (rest != 0) & even
    step = np.where((rest > 0) == (total > 0), 1, -1)  # away from zero where the exact sum is larger in magnitude
    return np.where(inexact, total.view(np.int64) + step, total.view(np.int64)).view(np.float64)
