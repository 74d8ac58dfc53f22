"""The row law, op by op: a row alone has the bits of the same row in any batch, on any number of threads and any
instruction set. Every NaN counts as the same one: its place is law, its sign and payload are the machine's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from bits import bit_patterns
from hypothesis import given, settings
from hypothesis import strategies as st
from leafsum import _C
from machines import THREAD_COUNTS, machine
from numpy.typing import NDArray
from oracle.inputs import F32, I32, KINDS, integers, numbers, permutation, weights
from oracle.rounding import DTYPES, Storage, narrow

MOST_ROWS = 17
Rows = NDArray[np.int64]
Results = list[NDArray]
Op = Callable[[Rows], Results]
"""Runs the op for the chosen rows of a pool of MOST_ROWS; results have one entry a row on axis 0."""

PROPERTY = settings(max_examples=12, deadline=None, derandomize=True, database=None)
num_rows = st.integers(1, MOST_ROWS)
batches = st.tuples(st.permutations(range(MOST_ROWS)), num_rows).map(lambda drawn: list(drawn[0][: drawn[1]]))
kinds = st.sampled_from(KINDS)
dtypes = st.sampled_from(DTYPES)
thread_counts = st.sampled_from(THREAD_COUNTS)


def without_nan_payloads(result: NDArray) -> NDArray:
    return np.where(np.isnan(result), np.float32(np.nan), result) if result.dtype == np.float32 else result


def run_on(instruction_set: str, num_threads: int, op: Op, rows: list[int]) -> Results:
    with machine(instruction_set, num_threads):
        return [without_nan_payloads(result) for result in op(np.array(rows))]


def assert_row_law(op: Op, rows: list[int], num_threads: int) -> None:
    """Every row of the batch, on every instruction set, against the row alone on one thread of the plain one."""
    alone = {row: run_on("plain", 1, op, [row]) for row in rows}
    for instruction_set in _C.instruction_sets():
        together = run_on(instruction_set, num_threads, op, rows)
        for place, row in enumerate(rows):
            for result, expected in zip(together, alone[row], strict=True):
                same = bit_patterns(result[place]) == bit_patterns(expected[0])
                assert np.all(same), f"row {row} at {place} of {len(rows)}: {instruction_set}, {num_threads} threads"


@PROPERTY
@given(rows=batches, kind=kinds, num_threads=thread_counts)
@pytest.mark.parametrize("name", ["exp", "log", "sin", "cos", "sigmoid", "softplus"])
def test_functions(name: str, rows: list[int], kind: str, num_threads: int) -> None:
    x = numbers("x", (MOST_ROWS, 37), kind)
    assert_row_law(lambda chosen: [getattr(_C, name)(x[chosen])], rows, num_threads)


@PROPERTY
@given(rows=batches, kind=kinds, dtype=dtypes, num_threads=thread_counts)
def test_rounding(rows: list[int], kind: str, dtype: str, num_threads: int) -> None:
    x = numbers("x", (MOST_ROWS, 37), kind)

    def op(chosen: Rows) -> Results:
        bits = _C.narrow(x[chosen], dtype)
        return [_C.round_to(x[chosen], dtype), bits, _C.widen(bits, dtype)]

    assert_row_law(op, rows, num_threads)


@PROPERTY
@given(rows=batches, kind=kinds, dtype=dtypes, num_threads=thread_counts, leaf_k=st.sampled_from([0, 16, 512]))
@pytest.mark.parametrize(("num_k", "num_columns"), [(70, 33), (530, 5)])
def test_linear(
    rows: list[int], kind: str, dtype: str, num_threads: int, leaf_k: int, num_k: int, num_columns: int
) -> None:
    x, bias = numbers("x", (MOST_ROWS, num_k), kind), numbers("bias", (num_columns,))
    packed = _C.pack_weight(weights("weight", (num_columns, num_k), dtype), dtype)
    assert_row_law(lambda chosen: [_C.linear(x[chosen], packed, dtype, num_columns, leaf_k, bias)], rows, num_threads)


@PROPERTY
@given(dtype=dtypes, kind=kinds, num_threads=thread_counts, first=st.integers(0, 40), count=st.integers(1, 24))
def test_columns_of_a_linear_do_not_depend_on_their_neighbours(
    dtype: str, kind: str, num_threads: int, first: int, count: int
) -> None:
    """The law along the other axis: a rank's share of columns is the same columns."""
    x, weight = numbers("x", (3, 90), kind), weights("weight", (64, 90), dtype)
    share = np.ascontiguousarray(weight[first : first + count])
    with machine(_C.instruction_sets()[0], num_threads):
        whole = _C.linear(x, _C.pack_weight(weight, dtype), dtype, 64, 0, None)
        part = _C.linear(x, _C.pack_weight(share, dtype), dtype, count, 0, None)
    expected = np.ascontiguousarray(whole[:, first : first + count])
    assert np.all(bit_patterns(without_nan_payloads(part)) == bit_patterns(without_nan_payloads(expected)))


@PROPERTY
@given(rows=batches, kind=kinds, dtype=dtypes, num_threads=thread_counts)
def test_linear_leaves(rows: list[int], kind: str, dtype: str, num_threads: int) -> None:
    x = numbers("x", (MOST_ROWS, 4 * 24), kind)
    packed = _C.pack_weight(weights("weight", (21, 4 * 24), dtype), dtype)
    assert_row_law(lambda chosen: [_C.linear_leaves(x[chosen], packed, dtype, 21, 24)], rows, num_threads)


@PROPERTY
@given(rows=batches, kind=kinds, dtype=dtypes, num_threads=thread_counts)
def test_experts(rows: list[int], kind: str, dtype: str, num_threads: int) -> None:
    num_experts, hidden, width = 5, 24, 19
    x, slot_weights = numbers("x", (MOST_ROWS, hidden), kind), numbers("w", (MOST_ROWS, 3), "mixed")
    ids = distinct_ids(num_experts, 3)
    gate, up, down = (
        np.stack([_C.pack_weight(weights(f"{part}{i}", shape, dtype), dtype) for i in range(num_experts)])
        for part, shape in {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}.items()
    )
    local_index = np.arange(num_experts, dtype=np.int32)

    def op(chosen: Rows) -> Results:
        out = np.full((len(chosen), 3, hidden), np.nan, dtype=np.float32)
        _C.experts(x[chosen], ids[chosen], slot_weights[chosen], gate, up, down, local_index, dtype, out)
        return [out]

    assert_row_law(op, rows, num_threads)


def distinct_ids(num_ids: int, num_slots: int) -> I32:
    rows = [np.sort(permutation(f"ids{row}", num_ids)[:num_slots]) for row in range(MOST_ROWS)]
    return np.stack(rows).astype(np.int32)


@PROPERTY
@given(rows=batches, kind=kinds, num_threads=thread_counts)
def test_norm_and_swiglu(rows: list[int], kind: str, num_threads: int) -> None:
    x, up, weight = (numbers(seed, shape, kind) for seed, shape in (("x", (17, 100)), ("u", (17, 100)), ("w", (100,))))
    op: Op = lambda chosen: [_C.rms_norm(x[chosen], weight, 1e-6, True), _C.swiglu(x[chosen], up[chosen])]  # noqa: E731
    assert_row_law(op, rows, num_threads)


@PROPERTY
@given(rows=batches, kind=kinds, num_threads=thread_counts)
def test_rotary(rows: list[int], kind: str, num_threads: int) -> None:
    x, positions = numbers("x", (MOST_ROWS, 3, 40), kind), integers("positions", 0, 50_000, (MOST_ROWS,))
    frequencies = np.exp2(-np.arange(12, dtype=np.float32))
    assert_row_law(lambda chosen: [_C.rotary(x[chosen], positions[chosen], frequencies, 1.25)], rows, num_threads)


@PROPERTY
@given(rows=batches, kind=kinds, num_threads=thread_counts, renormalise=st.booleans())
def test_router(rows: list[int], kind: str, num_threads: int, renormalise: bool) -> None:
    logits = numbers("logits", (MOST_ROWS, 70), kind)
    assert_row_law(lambda chosen: list(_C.router(logits[chosen], 6, renormalise)), rows, num_threads)


@PROPERTY
@given(rows=batches, kind=kinds, num_threads=thread_counts)
def test_head_and_hash(rows: list[int], kind: str, num_threads: int) -> None:
    logits, positions = numbers("logits", (MOST_ROWS, 150), kind), integers("positions", 0, 9999, (MOST_ROWS,))

    def op(chosen: Rows) -> Results:
        marks = _C.nonfinite_rows(logits[chosen]).astype(np.int32)
        return [*_C.argmax(logits[chosen]), marks, _C.residual_hash(logits[chosen], positions[chosen])]

    assert_row_law(op, rows, num_threads)


@PROPERTY
@given(
    rows=batches,
    kind=st.sampled_from(["plain", "tied", "cancelling", "special"]),
    dtype=dtypes,
    num_threads=thread_counts,
    page_size=st.sampled_from([1, 7, 16, 64]),
)
def test_attention(rows: list[int], kind: str, dtype: str, num_threads: int, page_size: int) -> None:
    """Rows of three slots at any length; the pages of the batch differ from those of the row alone."""
    q, row_slots = numbers("q", (MOST_ROWS, 4, 20), kind), integers("slots", 0, 3, (MOST_ROWS,))
    num_keys = np.minimum(integers("keys", 1, 300, (MOST_ROWS,)), 290)
    kv_index = np.array([0, 1, 1, 1], dtype=np.int32)
    paged = {size: store(numbers("kv", (2, 3, 300, 2, 20), kind), size, dtype, num_threads) for size in (16, page_size)}

    def op(chosen: Rows) -> Results:
        pages = paged[16 if len(chosen) == 1 else page_size]
        return [_C.attention(q[chosen], *pages, row_slots[chosen], num_keys[chosen], kv_index, 0.22, dtype)]

    assert_row_law(op, rows, num_threads)


def store(kv: F32, page_size: int, dtype: str, num_threads: int) -> tuple[Storage, Storage, I32]:
    """kv [2, slots, n, G, D] through store_kv, all rows of a slot at once, into scattered pages of NaN."""
    _, num_slots, num_keys, num_groups, head_dim = kv.shape
    pages_per_slot = -(-num_keys // page_size)
    table = permutation(f"pages{page_size}", num_slots * pages_per_slot).astype(np.int32).reshape(num_slots, -1)
    nan = narrow(np.full((1, 1, 1, 1), np.nan, dtype=np.float32), dtype)
    keys = np.tile(nan, (table.size, num_groups, head_dim, page_size))
    values = np.tile(nan, (table.size, num_groups, page_size, head_dim))
    positions = np.arange(num_keys, dtype=np.int32)
    with machine(_C.instruction_sets()[0], num_threads):
        for slot in range(num_slots):
            places = table[slot, positions // page_size], positions % page_size
            _C.store_kv(kv[0, slot], kv[1, slot], keys, values, *places, dtype)
    return keys, values, table


@PROPERTY
@given(rows=batches, kind=kinds, num_threads=thread_counts, ids_per_leaf=st.sampled_from([1, 8]))
def test_tree_nodes(rows: list[int], kind: str, num_threads: int, ids_per_leaf: int) -> None:
    ids, slot_rows = distinct_ids(30, 8), numbers("rows", (MOST_ROWS, 8, 21), kind)
    given_rows, given_nodes = numbers("given", (MOST_ROWS, 1, 21)), np.array([3], dtype=np.int32)
    wanted = np.array([1, 2, 4], dtype=np.int32)

    def op(chosen: Rows) -> Results:
        arguments = slot_rows[chosen], ids[chosen], 30, ids_per_leaf, True, given_nodes, given_rows[chosen]
        return [_C.tree_nodes(*arguments, wanted)]

    assert_row_law(op, rows, num_threads)
