"""round_to, narrow and widen are the oracle's, on ties, subnormals, overflow and every 16-bit pattern."""

from __future__ import annotations

import numpy as np
import pytest
from bits import assert_same_bits
from leafsum import _C
from machines import machines
from oracle.inputs import F32, KINDS, numbers
from oracle.rounding import DTYPES, narrow, round_to, widen

SHORT_DTYPES = ("bfloat16", "float16")


def around_every_tie(dtype: str) -> F32:
    """The point halfway between each two neighbours of dtype, and its own neighbours in FP32."""
    values = widen(np.arange(1 << 15, dtype=np.uint16), dtype)
    values = values[np.isfinite(values)]
    halfway = ((values[:-1].astype(np.float64) + values[1:]) / 2).astype(np.float32)
    last = 2 * values[-1:].astype(np.float64) - halfway[-1:]  # halfway to the value that does not exist
    halfway = np.append(halfway, last.astype(np.float32))
    infinity = np.float32(np.inf)
    around = np.concatenate([halfway, np.nextafter(halfway, infinity), np.nextafter(halfway, -infinity)])
    return np.concatenate([around, -around])


def assert_rounds_as_oracle(x: F32, dtype: str) -> None:
    number = ~np.isnan(x)
    rounded, stored = round_to(x, dtype), narrow(x, dtype)
    for _ in machines():
        assert_same_bits(_C.round_to(x, dtype), rounded, any_nan=True)
        actual = _C.narrow(x, dtype)
        assert_same_bits(actual[number], stored[number])
        assert np.isnan(widen(actual[~number], dtype)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding(kind: str, dtype: str) -> None:
    assert_rounds_as_oracle(numbers("rounding", (7, 143), kind), dtype)


@pytest.mark.parametrize("dtype", SHORT_DTYPES)
def test_ties(dtype: str) -> None:
    assert_rounds_as_oracle(around_every_tie(dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_whose_payload_lies_in_the_dropped_bits_stays_nan(dtype: str) -> None:
    x = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF], dtype=np.uint32).view(np.float32)
    assert_rounds_as_oracle(x, dtype)


@pytest.mark.parametrize("dtype", SHORT_DTYPES)
def test_widen_every_pattern(dtype: str) -> None:
    stored = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    for _ in machines():
        assert_same_bits(_C.widen(stored, dtype), widen(stored, dtype), any_nan=True)
