"""Hashes of rows and of generated ids, with Python integers (docs/numerics.md section 8)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U64 = NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_INFINITY = 0x7F800000
_ONE_NAN = 0x7FC00000


def splitmix64_finalizer(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def residual_hash(x: F32, positions: I32) -> U64:
    """[M, H], [M] -> [M]: every element's bits, its place and the row's position enter one finalizer; sum mod 2^64.

    Every NaN enters as one pattern.
    """
    hashes = []
    for row, position in zip(x.view(np.uint32), positions, strict=True):
        offset = (int(position) + 1) * _GOLDEN_GAMMA
        terms = (splitmix64_finalizer(_hashed_bits(int(bits)) + (i << 32) + offset) for i, bits in enumerate(row))
        hashes.append(sum(terms) & _MASK)
    return np.array(hashes, dtype=np.uint64)


def _hashed_bits(bits: int) -> int:
    return _ONE_NAN if bits & 0x7FFFFFFF > _INFINITY else bits


def token_sha256(token_ids: Iterable[int]) -> str:
    """The ids as little-endian uint32."""
    return hashlib.sha256(np.array(list(token_ids), dtype="<u4").tobytes()).hexdigest()


def logits_sha256(rows: Iterable[F32]) -> str:
    """The FP32 little-endian rows, in order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row.astype("<f4").tobytes())
    return digest.hexdigest()
