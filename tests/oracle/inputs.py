"""Numbers that try arithmetic, the same on every machine: made of the raw bits of a counter-based generator."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.rounding import Storage, narrow

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U64 = NDArray[np.uint64]
Shape = tuple[int, ...]

FINITE_KINDS = ("plain", "scales", "subnormal", "cancelling", "tied", "zeros", "mixed")
KINDS = (*FINITE_KINDS, "special")


def raw_bits(seed: str, count: int) -> U64:
    return np.asarray(np.random.Philox(key=zlib.crc32(seed.encode())).random_raw(count), dtype=np.uint64)


def integers(seed: str, low: int, high: int, shape: Shape) -> I32:
    """low <= value < high."""
    spread = raw_bits(seed, int(np.prod(shape))) >> np.uint64(11)
    return (low + (spread % np.uint64(high - low)).astype(np.int64)).astype(np.int32).reshape(shape)


def permutation(seed: str, count: int) -> NDArray[np.int64]:
    return np.argsort(raw_bits(seed, count), kind="stable")


def numbers(seed: str, shape: Shape, kind: str = "plain") -> F32:
    """FP32 values of one of KINDS; see the functions of those names below."""
    raw = raw_bits(f"{seed}/{kind}", int(np.prod(shape)))
    return _MAKERS[kind](raw).reshape(shape)


def weights(seed: str, shape: Shape, dtype: str, kind: str = "plain") -> Storage:
    """The same as storage of dtype."""
    return narrow(numbers(seed, shape, kind), dtype)


def _floats(raw: U64, low_exponent: int, high_exponent: int) -> F32:
    exponent = 127 + low_exponent + (raw >> np.uint64(40)) % np.uint64(high_exponent - low_exponent + 1)
    sign_and_fraction = (raw & np.uint64(0x7FFFFF)) | (raw >> np.uint64(63) << np.uint64(31))
    return (sign_and_fraction | exponent << np.uint64(23)).astype(np.uint32).view(np.float32)


def _plain(raw: U64) -> F32:
    return _floats(raw, -5, 1)


def _scales(raw: U64) -> F32:
    return _floats(raw, -60, 60)


def _subnormal(raw: U64) -> F32:
    """Below 2^-121: most are subnormal in FP32, and sums cross that border."""
    magnitude = (raw >> np.uint64(20)) % np.uint64(5 << 23) >> raw % np.uint64(24)
    return (magnitude | raw >> np.uint64(63) << np.uint64(31)).astype(np.uint32).view(np.float32)


def _cancelling(raw: U64) -> F32:
    """Pairs of neighbours that cancel but for their last few bits."""
    large = _floats(raw, 10, 20)
    large[1::2] = -large[: 2 * (len(large) // 2) : 2]
    last_bits = ((raw >> np.uint64(50)) % np.uint64(4)).astype(np.uint32)
    return (large.view(np.uint32) ^ last_bits).view(np.float32)


def _tied(raw: U64) -> F32:
    """Few distinct values: real ties in choices, and sums that lie halfway between two roundings."""
    values = np.array([0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.0**-24, 1 + 2.0**-8, 1 + 2.0**-11], dtype=np.float32)
    return values[(raw >> np.uint64(30)) % np.uint64(len(values))]


def _zeros(raw: U64) -> F32:
    some = np.where(raw % np.uint64(7) == 0, _plain(raw), np.float32(0.0))
    return np.copysign(some, np.where(raw >> np.uint64(63) == 1, np.float32(-1), np.float32(1)))


def _mixed(raw: U64) -> F32:
    makers = (_plain, _scales, _subnormal, _cancelling, _tied, _zeros)
    choice = (raw >> np.uint64(3)) % np.uint64(len(makers))
    return np.choose(choice.astype(np.int64), [maker(raw) for maker in makers]).astype(np.float32)


def _special(raw: U64) -> F32:
    values = np.array([np.inf, -np.inf, np.nan, 3.4e38, -3.4e38], dtype=np.float32)
    return np.where(raw % np.uint64(23) == 0, values[(raw >> np.uint64(9)) % np.uint64(5)], _mixed(raw))


_MAKERS: dict[str, Callable[[Any], F32]] = {
    "plain": _plain,
    "scales": _scales,
    "subnormal": _subnormal,
    "cancelling": _cancelling,
    "tied": _tied,
    "zeros": _zeros,
    "mixed": _mixed,
    "special": _special,
}
