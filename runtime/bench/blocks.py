"""Of the suite `kernels`: those of Flash Next's blocks, at the sizes it was published with, on one thread.

A prompt's rows are of one request, one step. Decode rows walk over copies of what they read: no cache holds it.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import _C
from .rounds import Variant

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

DTYPE = "bfloat16"
EPS = 1e-6
KEY_HEADS, VALUE_HEADS, HEAD_DIM, TAPS = 16, 48, 128, 4
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * HEAD_DIM
STREAMS, HIDDEN, LOW_RANK, LEAF_K = 4, 2560, 320, 512
INDEX_HEADS, BLOCK_SIZE, BLOCKS_PER_PAGE, BUDGET, CONTEXT = 4, 4, 16, 2048, 32768
PROMPT_ROWS, INDEX_ROWS = 1024, 64
BORDER, RING_ROWS = 64, 128
ROW_AT = BORDER + 32
"""Position of a decoded row: half way from one border of the state to the next."""

STATE_BYTES = VALUE_HEADS * HEAD_DIM * HEAD_DIM * 4
RATE, ROW_US, GBYTES = "tokens/s", "us a row", "GB/s"
DELTANET_ROW = "deltanet 1 row, its state"


def variants(read_bytes: int) -> list[Variant]:
    """`read_bytes`: how much the copies of what a decode row reads come to, at least."""
    return [
        Variant(f"deltanet {PROMPT_ROWS:,} rows", _many(_deltanet(PROMPT_ROWS, 0, 1), PROMPT_ROWS)),
        Variant(DELTANET_ROW, _deltanet_row(read_bytes)),
        Variant(f"causal_conv {PROMPT_ROWS:,} rows, {CHANNELS:,} channels", _many(_conv(PROMPT_ROWS), PROMPT_ROWS)),
        Variant(f"causal_conv 1 row, {CHANNELS:,} channels", _single(_conv(1), 100)),
        Variant(f"mixer {PROMPT_ROWS:,} rows, {STREAMS} streams", _many(_mixer(PROMPT_ROWS, 1), PROMPT_ROWS)),
        Variant(f"mixer 1 row, {STREAMS} streams", _mixer_row(read_bytes)),
        Variant(f"select_keys 1 row, {CONTEXT:,} keys", _single(_select(1), 20)),
        Variant(f"select_keys {INDEX_ROWS} rows, {CONTEXT:,} keys", _single(_select(INDEX_ROWS), 1, INDEX_ROWS)),
    ]


Call = Callable[[], object]
Measure = Callable[[], Mapping[str, float]]


def _taken_s(call: Call, num_calls: int = 1) -> float:
    begin_s = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - begin_s) / num_calls


def _many(call: Call, num_rows: int) -> Measure:
    return lambda: {RATE: num_rows / _taken_s(call)}


def _single(call: Call, num_calls: int, num_rows: int = 1) -> Measure:
    return lambda: {ROW_US: 1e6 * _taken_s(call, num_calls) / num_rows}


def _deltanet_row(read_bytes: int) -> Measure:
    num_slots = max(1, read_bytes // (3 * STATE_BYTES))  # a slot keeps three times what a row reads
    call = _deltanet(1, ROW_AT, num_slots)

    def measure_once() -> dict[str, float]:
        row_s = _taken_s(call, num_slots)
        return {ROW_US: 1e6 * row_s, GBYTES: STATE_BYTES / 1e9 / row_s}

    return measure_once


def _mixer_row(read_bytes: int) -> Measure:
    num_copies = max(1, read_bytes // (2 * 2 * LOW_RANK * STREAMS * HIDDEN))
    return _single(_mixer(1, num_copies), num_copies)


def _deltanet(num_rows: int, start: int, num_slots: int) -> Call:
    """Calls take the slots in turn."""
    gate, of_head = _random(num_rows, VALUE_HEADS), _random(VALUE_HEADS)
    step = functools.partial(
        _C.deltanet,
        _random(num_rows, CHANNELS),
        gate,
        gate,
        of_head,
        of_head,
        np.arange(VALUE_HEADS, dtype=np.int32) // np.int32(VALUE_HEADS // KEY_HEADS),
        np.full((num_slots, 2, VALUE_HEADS, HEAD_DIM, HEAD_DIM), 0.01, dtype=np.float32),
        np.full((num_slots, 2, KEY_HEADS, HEAD_DIM, BORDER), 0x3D00, dtype=np.uint16),
        np.full((num_slots, RING_ROWS, VALUE_HEADS, HEAD_DIM), 0.01, dtype=np.float32),
        np.full((num_slots, RING_ROWS, VALUE_HEADS), -0.1, dtype=np.float32),
    )
    slots = itertools.cycle([_runs(num_rows, start, slot) for slot in range(num_slots)])
    return lambda: step(*next(slots), HEAD_DIM**-0.5, DTYPE)


def _runs(num_rows: int, start: int, slot: int = 0) -> tuple[I32, I32, I32, I32]:
    """All rows of one slot."""
    slots, starts, ends = (np.array([number], dtype=np.int32) for number in (slot, start, num_rows))
    return np.arange(num_rows, dtype=np.int32), slots, starts, ends


def _conv(num_rows: int) -> Call:
    x, weight, ring = _random(num_rows, CHANNELS), _random(TAPS, CHANNELS), _random(1, RING_ROWS, CHANNELS)
    return functools.partial(_C.causal_conv, x, weight, 1, ring, *_runs(num_rows, ROW_AT))


def _mixer(num_rows: int, num_copies: int) -> Call:
    """What a block reads of the streams. Calls take copies of both weights in turn."""
    streams, norm_weight = _random(num_rows * STREAMS, HIDDEN), _random(STREAMS, HIDDEN)
    down, up = _packed(LOW_RANK + STREAMS, STREAMS * HIDDEN), _packed(STREAMS * HIDDEN, LOW_RANK)
    weights = itertools.cycle([(down.copy(), up.copy()) for _ in range(num_copies)])

    def mix() -> None:
        own_down, own_up = next(weights)
        normed = _C.rms_norm(streams, norm_weight, EPS, True).reshape(num_rows, -1)
        z = _C.linear(normed, own_down, DTYPE, LOW_RANK + STREAMS, LEAF_K, None)
        inner, _ = _C.hyper_gates(z, STREAMS, LOW_RANK)
        _C.hyper_mix(_C.linear(inner, own_up, DTYPE, STREAMS * HIDDEN, LEAF_K, None), normed, STREAMS)

    return mix


def _select(num_rows: int) -> Call:
    num_pages = CONTEXT // BLOCK_SIZE // BLOCKS_PER_PAGE
    queries, keys = _random(num_rows, INDEX_HEADS, HEAD_DIM), _random(num_pages, HEAD_DIM, BLOCKS_PER_PAGE)
    page_table = np.arange(num_pages, dtype=np.int32)[None]
    positions = np.arange(CONTEXT - num_rows, CONTEXT, dtype=np.int32)
    return functools.partial(
        _C.select_keys, queries, _C.narrow(keys, DTYPE), page_table, np.zeros(num_rows, dtype=np.int32), positions,
        BLOCK_SIZE, BUDGET, HEAD_DIM**-0.5, DTYPE,
    )  # fmt: skip


def _random(*shape: int) -> F32:
    return np.random.default_rng(1).standard_normal(shape, dtype=np.float32)


def _packed(num_columns: int, num_inputs: int) -> NDArray[Any]:
    return _C.pack_weight(_C.narrow(_random(num_columns, num_inputs), DTYPE), DTYPE)
