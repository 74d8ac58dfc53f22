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
        return np.asarray(np.add(np.asarray(x, np.float32), np.asarray(y, np.float32)))


def sub(x: Values, y: Values) -> F32:
    with np.errstate(all="ignore"):
        return np.asarray(np.subtract(np.asarray(x, np.float32), np.asarray(y, np.float32)))


def mul(x: Values, y: Values) -> F32:
    with np.errstate(all="ignore"):
        return np.asarray(np.multiply(np.asarray(x, np.float32), np.asarray(y, np.float32)))


def div(x: Values, y: Values) -> F32:
    with np.errstate(all="ignore"):
        return np.asarray(np.divide(np.asarray(x, np.float32), np.asarray(y, np.float32)))


def sqrt(x: Values) -> F32:
    with np.errstate(all="ignore"):
        return np.asarray(np.sqrt(np.asarray(x, np.float32)))


def fma(x: Values, y: Values, z: Values) -> F32:
    """fl32(x * y + z) with one rounding.

    The product of two FP32 values is exact in FP64 (48 bits). Their sum with z, rounded to odd in 53 bits, rounds to
    FP32 as the exact sum would, because 53 >= 24 + 2 (subnormal results have fewer bits still).
    """
    with np.errstate(all="ignore"):
        product = np.asarray(x, np.float32).astype(np.float64) * np.asarray(y, np.float32)
        return np.asarray(_sum_to_odd(product, np.asarray(z, np.float32)).astype(np.float32))


def _sum_to_odd(a: F64, b: F32) -> F64:
    total = np.asarray(a + b)
    b_part = total - a
    rest = (a - (total - b_part)) + (b - b_part)  # the exact error of the sum; NaN where that is not finite
    bits = total.view(np.int64)
    inexact_and_even = (abs(rest) > 0) & (bits & 1 == 0)
    step = np.where((rest > 0) == (total > 0), 1, -1)  # away from zero where the exact sum is larger in magnitude
    return (bits + step * inexact_and_even).view(np.float64)
