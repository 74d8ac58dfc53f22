"""Attention of docs/numerics.md section 5: segments of 256 keys, blocks of 64, by index in the list of visible keys.

The list of a row is every key up to its own, or the one that an indexer made.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oracle.fl32 import add, div, fma, mul, sub
from oracle.functions import exp, sigmoid
from oracle.lanes import NUM_LANES, fold
from oracle.rounding import Storage, narrow, round_to, widen

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

SEGMENT_KEYS = 256
BLOCK_KEYS = 64


@dataclass(frozen=True, slots=True)
class Partial:
    """One segment, or several merged: maxima [H], sums of powers [H] and unnormalised outputs [H, D]."""

    maximum: F32
    total: F32
    outputs: F32


def attend(query: F32, keys: F32, values: F32, scale: float, dtype: str) -> F32:
    """One row, each head by itself: query [H, D], keys and values [H, n, D] holding values of dtype -> [H, D]."""
    scores = mul(_dots(round_to(query, dtype), keys), scale)
    merged = None
    for start in range(0, keys.shape[1], SEGMENT_KEYS):
        stop = start + SEGMENT_KEYS
        segment = _segment(scores[:, start:stop], values[:, start:stop], dtype)
        merged = segment if merged is None else _merge(merged, segment)
    assert merged is not None, "a row sees at least one key"
    return div(merged.outputs, merged.total[:, None])


def _dots(query: F32, keys: F32) -> F32:
    total = np.zeros(keys.shape[:2], dtype=np.float32)
    for element in range(query.shape[1]):
        total = fma(query[:, None, element], keys[:, :, element], total)
    return total


def _segment(scores: F32, values: F32, dtype: str) -> Partial:
    num_heads, num_keys = scores.shape
    maximum = np.full(num_heads, -np.inf, dtype=np.float32)
    lanes = np.zeros((num_heads, NUM_LANES), dtype=np.float32)
    outputs = np.zeros((num_heads, values.shape[2]), dtype=np.float32)
    for start in range(0, num_keys, BLOCK_KEYS):
        block_scores, block_values = scores[:, start : start + BLOCK_KEYS], values[:, start : start + BLOCK_KEYS]
        new_maximum = np.maximum(maximum, block_scores.max(axis=1))
        shrink = exp(sub(maximum, new_maximum))[:, None]
        powers = exp(sub(block_scores, new_maximum[:, None]))
        block_keys = powers.shape[1]
        lanes = mul(lanes, shrink)
        lanes[:, :block_keys] = add(lanes[:, :block_keys], powers)
        outputs = mul(outputs, shrink)
        rounded = round_to(powers, dtype)
        for key in range(block_keys):
            outputs = fma(rounded[:, key, None], block_values[:, key], outputs)
        maximum = new_maximum
    return Partial(maximum, fold(lanes), outputs)


def _merge(left: Partial, right: Partial) -> Partial:
    maximum = np.maximum(left.maximum, right.maximum)
    a, b = exp(sub(left.maximum, maximum)), exp(sub(right.maximum, maximum))
    return Partial(
        maximum,
        add(mul(a, left.total), mul(b, right.total)),
        add(mul(a[:, None], left.outputs), mul(b[:, None], right.outputs)),
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
    selected: I32 | None = None,
    counts: I32 | None = None,
) -> F32:
    """q [M, Hq, D], key_pages [P, G, D, page_size], value_pages [P, G, page_size, D] -> [M, Hq, D].

    A row with counts above zero sees the positions selected[row, :counts[row]] alone; one with -1 is NaN.
    """
    page_size = key_pages.shape[3]
    out = np.empty_like(q)
    for row in range(len(q)):
        if counts is not None and counts[row] < 0:
            out[row] = np.nan
            continue
        seen = range(row_num_keys[row])
        if selected is not None and counts is not None and counts[row] > 0:
            seen = selected[row, : counts[row]].tolist()
        places = [(page_table[row_slots[row], position // page_size], position % page_size) for position in seen]
        keys = np.stack([key_pages[page, :, :, offset] for page, offset in places], axis=1)[kv_index]
        values = np.stack([value_pages[page, :, offset] for page, offset in places], axis=1)[kv_index]
        out[row] = attend(q[row], widen(keys, dtype), widen(values, dtype), scale, dtype)
    return out


def gated(outputs: F32, gate: F32) -> F32:
    """Every element of the outputs times the sigmoid of its gate."""
    return mul(outputs, sigmoid(gate))


def store_kv(
    k: F32, v: F32, key_pages: Storage, value_pages: Storage, row_pages: I32, row_offsets: I32, dtype: str
) -> None:
    """k, v [M, G, D], rounded to dtype, into their places; everything else in the pages stays."""
    for row, (page, offset) in enumerate(zip(row_pages, row_offsets, strict=True)):
        key_pages[page, :, :, offset] = narrow(k[row], dtype)
        value_pages[page, :, offset, :] = narrow(v[row], dtype)
