"""The oracle's own foundations, held against exact fractions: rounding and the operations of FP32."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from bits import assert_same_bits
from oracle import fl32
from oracle.inputs import F32, FINITE_KINDS, numbers
from oracle.rotary import frequencies
from oracle.rounding import DTYPES, FORMATS, nearest_bits, nearest_f32, rounded_bits, widen

COUNT = 400


def rounded(exact: list[Fraction]) -> F32:
    return np.array([nearest_f32(value) for value in exact], dtype=np.float32)


def without_zero_signs(x: F32) -> F32:
    """A fraction has no -0.0; the signs of zeros are IEEE 754's and not the emulation's."""
    return np.where(x == 0, np.float32(0), x)


def fractions(x: F32) -> list[Fraction]:
    return [Fraction(float(value)) for value in x]


@pytest.mark.parametrize("kind", FINITE_KINDS)
def test_operations_round_the_exact_result_once(kind: str) -> None:
    x, y, z = (numbers(seed, (COUNT,), kind) for seed in "xyz")
    exact = list(zip(fractions(x), fractions(y), fractions(z), strict=True))
    assert_same_bits(without_zero_signs(fl32.add(x, z)), without_zero_signs(rounded([a + c for a, _, c in exact])))
    assert_same_bits(without_zero_signs(fl32.mul(x, y)), without_zero_signs(rounded([a * b for a, b, _ in exact])))
    assert_same_bits(
        without_zero_signs(fl32.fma(x, y, z)), without_zero_signs(rounded([a * b + c for a, b, c in exact]))
    )


def halfway_triples() -> tuple[F32, F32, F32]:
    """Products halfway between two FP32 values, and addends too small to be seen in 53 bits beside them."""
    x = numbers("x", (COUNT,)).view(np.uint32) | 1
    significands = (x.view(np.float32), np.full(COUNT, 1.5, dtype=np.float32))
    tiny = numbers("z", (COUNT,)) * np.float32(2.0**-70)
    return *significands, tiny


def test_fma_has_no_second_rounding() -> None:
    x, y, z = halfway_triples()
    exact = [a * b + c for a, b, c in zip(fractions(x), fractions(y), fractions(z), strict=True)]
    assert_same_bits(fl32.fma(x, y, z), rounded(exact))
    twice_rounded = (x.astype(np.float64) * y + z).astype(np.float32)
    assert (twice_rounded != rounded(exact)).any(), "these triples must be able to tell one rounding from two"


def test_fma_at_the_borders_of_fp32() -> None:
    largest, smallest = np.finfo(np.float32).max, np.float32(2.0**-149)
    half_step = np.float32(2.0**103)
    cases = [
        (largest, 1.0, half_step, np.inf),
        (largest, 1.0, np.nextafter(half_step, np.float32(0)), largest),
        (smallest, 0.5, 0.0, 0.0),
        (smallest, 0.5, smallest, np.float32(2.0**-148)),
        (-smallest, 0.25, 0.0, -0.0),
        (np.inf, 0.0, 1.0, np.nan),
        (1.0, -1.0, 1.0, 0.0),
    ]
    for x, y, z, expected in cases:
        assert_same_bits(fl32.fma(x, y, z), np.asarray(expected, dtype=np.float32), any_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FINITE_KINDS)
def test_rounding_by_integers_is_rounding_of_fractions(dtype: str, kind: str) -> None:
    x = numbers("rounding", (COUNT,), kind)
    expected = np.array([nearest_bits(value, dtype) for value in fractions(x)], dtype=np.int64)
    expected[np.signbit(x)] |= FORMATS[dtype].sign_bit  # the sign of a zero
    assert_same_bits(rounded_bits(x, dtype), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_16_bit_pattern_widens_and_rounds_to_itself(dtype: str) -> None:
    stored = np.arange(1 << 16, dtype=np.uint16)
    wide = widen(stored, dtype)
    number = ~np.isnan(wide)
    assert_same_bits(rounded_bits(wide, dtype)[number], stored.astype(np.int64)[number])
    assert (~number).sum() == 2 * ((1 << (FORMATS[dtype].precision - 1)) - 1)


def test_frequencies_are_exact_powers_rounded_once() -> None:
    powers_of_two = [2.0 ** (-4 * i) for i in range(8)]
    assert_same_bits(frequencies(2.0**32, 16), np.array(powers_of_two, dtype=np.float32))
    for theta, width in ((10000.0, 128), (1e6, 64), (5e6, 8)):
        close = theta ** (-np.arange(0, width, 2) / width)
        np.testing.assert_allclose(frequencies(theta, width), close, rtol=2.0**-23)
