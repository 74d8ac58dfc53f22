"""Attention of docs/numerics.md section 5: segments of 256 keys, blocks of 64, by index in the list of visible keys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oracle.fl32 import add, div, f32, fma, mul, sub
from oracle.functions import exp
from oracle.lanes import NUM_LANES, fold
from oracle.linear import chain
from oracle.rounding import Storage, narrow, round_to, widen

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

SEGMENT_KEYS = 256
BLOCK_KEYS = 64


@dataclass(frozen=True, slots=True)
class Partial:
    """One segment, or several merged: the maximum [], the sum of powers [] and the unnormalised outputs [D]."""

    maximum: F32
    total: F32
    outputs: F32


def attend(query: F32, keys: F32, values: F32, scale: float, dtype: str) -> F32:
    """One row of one head: query [D], keys and values [n, D] holding values of dtype -> [D]."""
    scores = mul(chain(round_to(query, dtype)[None, :], keys)[0], scale)
    merged = None
    for start in range(0, len(keys), SEGMENT_KEYS):
        stop = start + SEGMENT_KEYS
        segment = _segment(scores[start:stop], values[start:stop], dtype)
        merged = segment if merged is None else _merge(merged, segment)
    assert merged is not None, "a row sees at least one key"
    return div(merged.outputs, merged.total)


def _segment(scores: F32, values: F32, dtype: str) -> Partial:
    maximum = f32(-np.inf)
    lanes = np.zeros(NUM_LANES, dtype=np.float32)
    outputs = np.zeros(values.shape[1], dtype=np.float32)
    for start in range(0, len(scores), BLOCK_KEYS):
        block_scores, block_values = scores[start : start + BLOCK_KEYS], values[start : start + BLOCK_KEYS]
        new_maximum = np.maximum(maximum, block_scores.max())
        shrink = exp(sub(maximum, new_maximum))
        powers = exp(sub(block_scores, new_maximum))
        lanes = mul(lanes, shrink)
        lanes[: len(powers)] = add(lanes[: len(powers)], powers)
        outputs = mul(outputs, shrink)
        for power, value in zip(round_to(powers, dtype), block_values, strict=True):
            outputs = fma(power, value, outputs)
        maximum = new_maximum
    return Partial(maximum, fold(lanes), outputs)


def _merge(left: Partial, right: Partial) -> Partial:
    maximum = np.maximum(left.maximum, right.maximum)
    a, b = exp(sub(left.maximum, maximum)), exp(sub(right.maximum, maximum))
    return Partial(
        maximum,
        add(mul(a, left.total), mul(b, right.total)),
        add(mul(a, left.outputs), mul(b, right.outputs)),
    )


def paged_attention(
    q: F32,
    key_pages: Storage,
    value_pages: Storage,
    page_table: I32,
    row_slots: I32,
    row_num_keys: I32,
    kv_index: I32,
    scale: float,
    dtype: str,
) -> F32:
    """q [M, Hq, D], key_pages [P, G, D, page_size], value_pages [P, G, page_size, D] -> [M, Hq, D]."""
    page_size = key_pages.shape[3]
    out = np.empty_like(q)
    for row, head in np.ndindex(*q.shape[:2]):
        group = kv_index[head]
        places = [
            (page_table[row_slots[row], position // page_size], position % page_size)
            for position in range(row_num_keys[row])
        ]
        keys = np.stack([widen(key_pages[page, group, :, offset], dtype) for page, offset in places])
        values = np.stack([widen(value_pages[page, group, offset], dtype) for page, offset in places])
        out[row, head] = attend(q[row, head], keys, values, scale, dtype)
    return out


def store_kv(
    k: F32, v: F32, key_pages: Storage, value_pages: Storage, row_pages: I32, row_offsets: I32, dtype: str
) -> None:
    """k, v [M, G, D], rounded to dtype, into their places; everything else in the pages stays."""
    for row, (page, offset) in enumerate(zip(row_pages, row_offsets, strict=True)):
        key_pages[page, :, :, offset] = narrow(k[row], dtype)
        value_pages[page, :, offset, :] = narrow(v[row], dtype)
