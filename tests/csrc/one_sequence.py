"""Kernels that keep memory by slot, called for one sequence from position 0 on, in memory that starts as NaN."""

from __future__ import annotations

import numpy as np
from leafsum import _C
from numpy.typing import NDArray
from oracle.inputs import F32, I32
from oracle.rounding import Storage

BLOCKS_PER_PAGE = 3


def convolution(x: F32, weight: F32, dilation: int) -> F32:
    """x [T, C], weight [C, taps] as the checkpoint has it."""
    ring = _nan(1, (weight.shape[1] - 1) * dilation + 1, x.shape[1])
    return _C.causal_conv(x, np.ascontiguousarray(weight.T), dilation, ring, *_runs(len(x)))


def deltanet(
    qkv: F32,
    b: F32,
    a: F32,
    a_log: F32,
    dt_bias: F32,
    key_index: I32,
    num_key_heads: int,
    key_dim: int,
    scale: float,
    dtype: str,
) -> F32:
    """As oracle.deltanet, the outputs alone."""
    num_heads = len(key_index)
    value_dim = (qkv.shape[1] - 2 * num_key_heads * key_dim) // num_heads
    memory = (
        _nan(1, 2, num_heads, key_dim, value_dim),
        _C.narrow(_nan(1, 2, num_key_heads, key_dim, 64), dtype),
        _nan(1, 128, num_heads, value_dim),
        _nan(1, 128, num_heads),
    )
    return _C.deltanet(qkv, b, a, a_log, dt_bias, key_index, *memory, *_runs(len(qkv)), scale, dtype)


def index_pages(
    raw: F32,
    weight: F32,
    eps: float,
    one_plus_weight: bool,
    frequency: F32,
    attention_factor: float,
    block_size: int,
    dtype: str,
) -> Storage:
    """raw [T, D] -> the pooled keys in pages [P, D, BLOCKS_PER_PAGE], in order."""
    num_pages = len(raw) // block_size // BLOCKS_PER_PAGE + 1
    pages = _C.narrow(_nan(num_pages, raw.shape[1], BLOCKS_PER_PAGE), dtype)
    rules = weight, eps, one_plus_weight, frequency, attention_factor, block_size
    ring = _nan(1, block_size, raw.shape[1])
    _C.store_index_keys(raw, ring, *rules, pages, _table(pages), *_runs(len(raw)), dtype)
    return pages


def pooled_keys(raw: F32, *rules: object) -> F32:
    """As oracle.indexer.pooled_keys, by store_index_keys: [T // block_size, D]."""
    block_size, dtype = int(str(rules[-2])), str(rules[-1])
    pages = index_pages(raw, *rules)
    keys = _C.widen(pages, dtype).swapaxes(1, 2).reshape(-1, raw.shape[1])
    return np.ascontiguousarray(keys[: len(raw) // block_size])


def select_keys(
    queries: F32, pages: Storage, positions: I32, block_size: int, budget: int, scale: float, dtype: str
) -> tuple[I32, I32]:
    slots = np.zeros(len(queries), dtype=np.int32)
    return _C.select_keys(queries, pages, _table(pages), slots, positions, block_size, budget, scale, dtype)


def _runs(num_rows: int) -> tuple[I32, I32, I32, I32]:
    zero = np.zeros(1, dtype=np.int32)
    return np.arange(num_rows, dtype=np.int32), zero, zero, np.array([num_rows], dtype=np.int32)


def _table(pages: Storage) -> I32:
    return np.arange(len(pages), dtype=np.int32)[None]


def _nan(*shape: int) -> NDArray[np.float32]:
    return np.full(shape, np.nan, dtype=np.float32)
