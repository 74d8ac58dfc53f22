"""Linear layers of docs/numerics.md section 2: wide, narrow and row-split."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oracle.fl32 import add, fma
from oracle.rounding import Storage, round_to, widen

F32 = NDArray[np.float32]

NARROW_LEAF_K = 512
COLUMNS_PER_BLOCK = 16


def chain(x: F32, weight: F32) -> F32:
    """x [M, K], weight [N, K] -> [M, N]: k ascending by fma from +0.0."""
    total = np.zeros((x.shape[0], weight.shape[0]), dtype=np.float32)
    for k in range(x.shape[1]):
        total = fma(x[:, k, None], weight[None, :, k], total)
    return total


def chains(x: F32, weight: F32, leaf_k: int) -> list[F32]:
    """The leaves of leaf_k elements of K, each a chain; the last one may be short."""
    return [chain(x[:, k : k + leaf_k], weight[:, k : k + leaf_k]) for k in range(0, x.shape[1], leaf_k)]


def wide(x: F32, weight: Storage, dtype: str, bias: F32 | None = None) -> F32:
    """x [M, K], rounded to dtype; weight [N, K] storage of dtype -> [M, N]."""
    return _with_bias(chain(round_to(x, dtype), widen(weight, dtype)), bias)


def narrow_linear(x: F32, weight: Storage, dtype: str, bias: F32 | None = None, leaf_k: int = NARROW_LEAF_K) -> F32:
    """As wide, in leaves of leaf_k: the first is taken as it is, the others are added ascending."""
    first, *others = chains(round_to(x, dtype), widen(weight, dtype), leaf_k)
    total = first
    for leaf in others:
        total = add(total, leaf)
    return _with_bias(total, bias)


def row_split_leaves(x: F32, weight: Storage, dtype: str, leaf_k: int) -> F32:
    """x [M, L * leaf_k], weight [N, L * leaf_k] -> [M, L, N], the leaves before the tree."""
    return np.stack(chains(round_to(x, dtype), widen(weight, dtype), leaf_k), axis=1)


def pack(weight: Storage) -> Storage:
    """[N, K] -> [ceil(N/16), K, 16] with zero columns past N."""
    num_columns, num_k = weight.shape
    num_blocks = -(-num_columns // COLUMNS_PER_BLOCK)
    packed = np.zeros((num_blocks, num_k, COLUMNS_PER_BLOCK), dtype=weight.dtype)
    for column in range(num_columns):
        packed[column // COLUMNS_PER_BLOCK, :, column % COLUMNS_PER_BLOCK] = weight[column]
    return packed


def _with_bias(total: F32, bias: F32 | None) -> F32:
    return total if bias is None else add(total, bias)
