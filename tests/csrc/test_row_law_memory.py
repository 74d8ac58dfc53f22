"""The row law of kernels that keep memory by slot: outputs and memory are those of one row at a time, whatever the
cuts, the batches, the threads and the instruction set. And of the row kernels of hyper-connections and gates."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from bits import assert_same_bits
from csrc.steps import Piece, Step, one_by_one, replay, step
from csrc.test_row_law import MOST_ROWS, PROPERTY, assert_row_law, batches, dtypes, kinds, thread_counts
from hypothesis import given
from hypothesis import strategies as st
from leafsum import _C
from machines import machine
from numpy.typing import NDArray
from oracle.inputs import F32, numbers, permutation
from oracle.rounding import narrow

NUM_SLOTS, NUM_ROWS = 3, 140
LENGTHS = {0: 140, 2: 77}
TABLE = permutation("pages", NUM_SLOTS * 20).astype(np.int32).reshape(NUM_SLOTS, 20)

Results = list[NDArray]
Kernel = Callable[[list[Step], str, str], Results]
"""Runs steps on rows of a kind in a compute dtype; outputs first, then the memory."""

row_kinds = st.sampled_from(["plain", "mixed", "special"])


sizes = st.sampled_from([0, 1, 2, 5, 16, 63, 64, 65, 129])
calls = st.lists(st.tuples(sizes, sizes), max_size=12)
"""Of each call, how many rows of either slot come; a last call brings all that are left."""


def steps_of(sizes_of_calls: list[tuple[int, int]]) -> list[Step]:
    done, steps = dict.fromkeys(LENGTHS, 0), []
    for sizes_of_call in [*sizes_of_calls, (NUM_ROWS, NUM_ROWS)]:
        pieces: list[Piece] = []
        for (slot, length), size in zip(LENGTHS.items(), sizes_of_call, strict=True):
            stop = min(done[slot] + size, length)
            if stop > done[slot]:
                pieces.append((slot, done[slot], stop))
                done[slot] = stop
        if pieces:
            steps.append(step(*pieces))
    return steps


def rows_of(name: str, width: int, kind: str) -> F32:
    return numbers(name, (NUM_SLOTS, NUM_ROWS, width), kind)


def nan(*shape: int) -> F32:
    return np.full(shape, np.nan, dtype=np.float32)


def finite_if_plain(outputs: F32, kind: str) -> F32:
    """Two runs that read memory of NaN alike would agree."""
    assert kind != "plain" or all(np.isfinite(outputs[slot, :length]).all() for slot, length in LENGTHS.items())
    return outputs


def causal_conv(steps: list[Step], kind: str, _: str) -> Results:
    x, weight, ring = rows_of("x", 40, kind), numbers("weight", (4, 40)), nan(NUM_SLOTS, 128, 40)
    call = lambda each: _C.causal_conv(x[each.slots, each.positions], weight, 3, ring, *each.runs)  # noqa: E731
    return [finite_if_plain(replay(steps, call, nan(*x.shape)), kind), ring]


def deltanet(steps: list[Step], kind: str, dtype: str) -> Results:
    key_index = np.array([0, 0, 1], dtype=np.int32)
    qkv, b, a = rows_of("qkv", 2 * 2 * 8 + 3 * 20, kind), rows_of("b", 3, "plain"), rows_of("a", 3, "plain")
    gates = numbers("a_log", (3,)), numbers("dt_bias", (3,)), key_index
    memory = (
        nan(NUM_SLOTS, 2, 3, 8, 20),
        narrow(nan(NUM_SLOTS, 2, 2, 8, 64), dtype),
        nan(NUM_SLOTS, 128, 3, 20),
        nan(NUM_SLOTS, 128, 3),
    )

    def call(each: Step) -> F32:
        rows = (part[each.slots, each.positions] for part in (qkv, b, a))
        return _C.deltanet(*rows, *gates, *memory, *each.runs, 0.35, dtype)

    outputs = replay(steps, call, nan(NUM_SLOTS, NUM_ROWS, 3, 20))
    return [finite_if_plain(outputs, kind), *memory]


def store_index_keys(steps: list[Step], kind: str, dtype: str) -> Results:
    raw, ring, weight = rows_of("raw", 18, kind), nan(NUM_SLOTS, 128, 18), numbers("weight", (18,))
    pages, frequencies = narrow(nan(NUM_SLOTS * 20, 18, 3), dtype), np.exp2(-np.arange(4, dtype=np.float32))
    for each in steps:
        rows = raw[each.slots, each.positions]
        _C.store_index_keys(rows, ring, weight, 1e-6, True, frequencies, 1.0, 4, pages, TABLE, *each.runs, dtype)
    return [pages, ring]


KERNELS: dict[str, Kernel] = {kernel.__name__: kernel for kernel in (causal_conv, deltanet, store_index_keys)}


@cache
def alone(name: str, kind: str, dtype: str) -> Results:
    """One row a call, one thread, no vectors."""
    with machine("plain", 1):
        return KERNELS[name](one_by_one(LENGTHS), kind, dtype)


@PROPERTY
@given(sizes_of_calls=calls, kind=row_kinds, dtype=dtypes, num_threads=thread_counts)
@pytest.mark.parametrize("name", KERNELS)
def test_cuts_and_batches(
    name: str, sizes_of_calls: list[tuple[int, int]], kind: str, dtype: str, num_threads: int
) -> None:
    steps = steps_of(sizes_of_calls)
    for instruction_set in _C.instruction_sets():
        with machine(instruction_set, num_threads):
            found = KERNELS[name](steps, kind, dtype)
        for result, expected in zip(found, alone(name, kind, dtype), strict=True):
            assert_same_bits(result, expected, any_nan=True)


@PROPERTY
@given(rows=batches, kind=kinds, dtype=dtypes, num_threads=thread_counts, blocks_per_page=st.sampled_from([1, 7, 16]))
def test_select_keys(rows: list[int], kind: str, dtype: str, num_threads: int, blocks_per_page: int) -> None:
    """Rows of three slots; the pages of the batch differ from those of the row alone."""
    q, slots = numbers("q", (MOST_ROWS, 5, 12), kind), np.arange(MOST_ROWS, dtype=np.int32) % 3
    positions = (np.arange(MOST_ROWS, dtype=np.int32) * 37) % 200
    keys = narrow(numbers("keys", (NUM_SLOTS, 70, 12), kind), dtype)
    paged = {size: in_pages(keys, size) for size in (16, blocks_per_page)}

    def op(chosen: NDArray[np.int64]) -> Results:
        pages = paged[16 if len(chosen) == 1 else blocks_per_page]
        return list(_C.select_keys(q[chosen], *pages, slots[chosen], positions[chosen], 3, 30, 0.25, dtype))

    assert_row_law(op, rows, num_threads)


def in_pages(keys: NDArray, blocks_per_page: int) -> tuple[NDArray, NDArray]:
    """keys [slots, n, D] in scattered pages -> key_pages [P, D, blocks_per_page], page_table [slots, pages]."""
    num_slots, num_blocks, width = keys.shape
    pages_per_slot = -(-num_blocks // blocks_per_page)
    table = permutation(f"pages{blocks_per_page}", num_slots * pages_per_slot).astype(np.int32).reshape(num_slots, -1)
    pages = np.zeros((table.size, width, blocks_per_page), dtype=keys.dtype)
    for slot, block in np.ndindex(num_slots, num_blocks):
        pages[table[slot, block // blocks_per_page], :, block % blocks_per_page] = keys[slot, block]
    return pages, table


@PROPERTY
@given(rows=batches, kind=kinds, num_threads=thread_counts)
def test_streams_and_gates(rows: list[int], kind: str, num_threads: int) -> None:
    streams, other, gates = (numbers(seed, (MOST_ROWS, 3 * 37), kind) for seed in ("streams", "other", "gates"))
    row, weights = numbers("row", (MOST_ROWS, 37), kind), numbers("weights", (MOST_ROWS, 3), kind)
    by_group, plain = numbers("by group", (3, 37)), numbers("plain", (37,))

    def op(chosen: NDArray[np.int64]) -> Results:
        x, y, z = streams[chosen], other[chosen], gates[chosen]
        grouped = x.reshape(-1, 3, 37)
        return [
            _C.rms_norm(grouped, by_group, 1e-6, True),
            _C.gated_norm(grouped, z.reshape(-1, 3, 37), plain, 1e-6, "silu"),
            _C.gated_norm(row[chosen], x[:, :37].copy(), plain, 1e-6, "sigmoid"),
            _C.sigmoid_times(x, z),
            *_C.hyper_gates(z, 3, 100),
            _C.hyper_mix(z, x, 3),
            _C.hyper_write(x, row[chosen], weights[chosen]),
            _C.ngram_values(x, y, row[chosen], 0.16),
        ]

    assert_row_law(op, rows, num_threads)


@PROPERTY
@given(rows=batches, kind=kinds, dtype=dtypes, num_threads=thread_counts)
def test_attention_over_lists(rows: list[int], kind: str, dtype: str, num_threads: int) -> None:
    """Some rows have a list and some have none: neither changes the other."""
    q, keys = numbers("q", (MOST_ROWS, 4, 12), kind), narrow(numbers("k", (8, 2, 12, 16), kind), dtype)
    values = narrow(numbers("v", (8, 2, 16, 12), kind), dtype)
    counts = (np.arange(MOST_ROWS, dtype=np.int32) % 3) * 20
    selected = np.stack([np.sort(permutation(f"list{row}", 120)[:45]) for row in range(MOST_ROWS)]).astype(np.int32)
    seen = np.where(counts > 0, 120, 1 + 7 * np.arange(MOST_ROWS)).astype(np.int32)
    table, kv_index = permutation("pages", 8).astype(np.int32)[None], np.array([0, 1, 1, 0], dtype=np.int32)

    def op(chosen: NDArray[np.int64]) -> Results:
        slots = np.zeros(len(chosen), dtype=np.int32)
        arguments = q[chosen], keys, values, table, slots, seen[chosen], kv_index, 0.3, dtype
        return [_C.attention(*arguments, selected[chosen], counts[chosen])]

    assert_row_law(op, rows, num_threads)
