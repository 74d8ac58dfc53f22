"""One rounding to float32, bfloat16 or float16, done with integers: to nearest, ties to even, subnormals kept."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import isqrt

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]
I64 = NDArray[np.int64]
Storage = F32 | U16


@dataclass(frozen=True, slots=True)
class Format:
    """A binary format: precision counts the implicit bit, min_exponent is that of the smallest normal value."""

    num_bits: int
    precision: int
    min_exponent: int

    @property
    def sign_bit(self) -> int:
        return 1 << (self.num_bits - 1)

    @property
    def infinity(self) -> int:
        return ((1 << (self.num_bits - self.precision)) - 1) << (self.precision - 1)

    @property
    def quiet_nan(self) -> int:
        return self.infinity | 1 << (self.precision - 2)


FORMATS = {"float32": Format(32, 24, -126), "bfloat16": Format(16, 8, -126), "float16": Format(16, 11, -14)}
DTYPES = tuple(FORMATS)


def nearest_bits(value: Fraction, dtype: str = "float32") -> int:
    """The bit pattern of an exact number after one rounding; a zero is +0.0 and underflow keeps the sign."""
    form = FORMATS[dtype]
    sign = form.sign_bit if value < 0 else 0
    value = abs(value)
    if value == 0:
        return sign
    exponent = max(_floor_log2(value), form.min_exponent)
    quanta = round(value / Fraction(2) ** (exponent - form.precision + 1))  # round() of a Fraction takes ties to even
    magnitude = ((exponent - form.min_exponent) << (form.precision - 1)) + quanta
    return sign | min(magnitude, form.infinity)


def _floor_log2(value: Fraction) -> int:
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if Fraction(2) ** guess <= value else guess - 1


def nearest_f32(value: Fraction) -> np.float32:
    """An exact number rounded once to FP32."""
    return np.uint32(nearest_bits(value)).view(np.float32)


def inverse_sqrt(number: int) -> np.float32:
    """number^-0.5, the exact value rounded once: 256 bits of an integer square root, never on a border by chance."""
    return nearest_f32(Fraction(1 << 256, isqrt(number << 512)))


def rounded_bits(x: F32, dtype: str) -> I64:
    """FP32 values rounded to dtype, as bit patterns of dtype; NaN becomes the quiet NaN of the same sign."""
    form = FORMATS[dtype]
    bits = x.view(np.uint32).astype(np.int64)
    sign = np.where(bits >> 31 == 1, form.sign_bit, 0)
    field, fraction = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    significand = np.where(field > 0, fraction | 1 << 23, fraction)
    exponent = np.maximum(field, 1) - 127  # value = significand * 2^(exponent - 23)
    kept_exponent = np.maximum(exponent, form.min_exponent)
    dropped_bits = np.minimum(kept_exponent - form.precision + 1 - (exponent - 23), 40)
    quanta = _shift_right_to_even(significand, dropped_bits)
    magnitude = ((kept_exponent - form.min_exponent) << (form.precision - 1)) + quanta
    magnitude = np.minimum(magnitude, form.infinity)
    magnitude = np.where(field == 0xFF, np.where(fraction > 0, form.quiet_nan, form.infinity), magnitude)
    return sign | magnitude


def _shift_right_to_even(value: I64, num_bits: I64) -> I64:
    kept = value >> num_bits
    twice_rest, one = 2 * (value - (kept << num_bits)), np.int64(1) << num_bits
    up = (twice_rest > one) | ((twice_rest == one) & (kept & 1 == 1))
    return kept + up.astype(np.int64)


def narrow(x: F32, dtype: str) -> Storage:
    """x rounded to dtype, as storage: float32, or uint16 bits."""
    if dtype == "float32":
        return x.copy()
    return rounded_bits(x, dtype).astype(np.uint16)


def widen(stored: Storage, dtype: str) -> F32:
    """The FP32 values of storage of dtype; exact."""
    if dtype == "float32":
        return stored.view(np.float32).copy()
    form = FORMATS[dtype]
    bits = stored.astype(np.int64)
    magnitude = bits & (form.sign_bit - 1)
    field, fraction = magnitude >> (form.precision - 1), magnitude & ((1 << (form.precision - 1)) - 1)
    significand = np.where(field > 0, fraction | 1 << (form.precision - 1), fraction).astype(np.float64)
    value = np.ldexp(significand, (np.maximum(field, 1) - 1 + form.min_exponent - form.precision + 1).astype(np.int32))
    value = np.where(magnitude == form.infinity, np.inf, np.where(magnitude > form.infinity, np.nan, value))
    with np.errstate(over="ignore"):
        return np.copysign(value, np.where(bits & form.sign_bit, -1.0, 1.0)).astype(np.float32)


def round_to(x: F32, dtype: str) -> F32:
    """FP32 values that hold x rounded to dtype."""
    return widen(narrow(x, dtype), dtype)
