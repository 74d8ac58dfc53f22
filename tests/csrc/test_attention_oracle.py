"""store_kv and attention are the oracle's: segments and blocks by index, whatever the pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from bits import assert_same_bits
from leafsum import _C
from machines import machines
from oracle.attention import paged_attention, store_kv
from oracle.inputs import F32, I32, integers, numbers, permutation
from oracle.rounding import DTYPES, Storage, inverse_sqrt, narrow

BORDERS = (1, 2, 63, 64, 65, 127, 129, 255, 256, 257, 320, 513)


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of one layer in which nothing but what a row may see is a number; slots own scattered pages."""

    keys: Storage
    values: Storage
    table: I32


def empty_pages(num_slots: int, capacity: int, num_groups: int, head_dim: int, page_size: int, dtype: str) -> Pages:
    pages_per_slot = -(-capacity // page_size)
    num_pages = num_slots * pages_per_slot + 3
    table = permutation("pages", num_pages)[: num_slots * pages_per_slot].astype(np.int32)
    nan = narrow(np.full((1, 1, 1, 1), np.nan, dtype=np.float32), dtype)
    return Pages(
        np.tile(nan, (num_pages, num_groups, head_dim, page_size)),
        np.tile(nan, (num_pages, num_groups, page_size, head_dim)),
        table.reshape(num_slots, pages_per_slot),
    )


def fill(pages: Pages, slot: int, k: F32, v: F32, dtype: str) -> None:
    """k, v [n, G, D] at positions 0..n-1 of a slot, by the oracle."""
    page_size = pages.keys.shape[3]
    positions = np.arange(len(k))
    row_pages = pages.table[slot, positions // page_size]
    store_kv(k, v, pages.keys, pages.values, row_pages, (positions % page_size).astype(np.int32), dtype)


def filled_pages(capacity: int, num_groups: int, head_dim: int, page_size: int, dtype: str, kind: str) -> Pages:
    """Two slots, the first `capacity` positions of both filled."""
    pages = empty_pages(2, capacity, num_groups, head_dim, page_size, dtype)
    for slot in range(2):
        k, v = (numbers(f"{part}{slot}", (capacity, num_groups, head_dim), kind) for part in "kv")
        fill(pages, slot, k, v, dtype)
    return pages


def assert_attends_as_oracle(
    q: F32, pages: Pages, row_slots: I32, row_num_keys: I32, kv_index: I32, dtype: str, any_nan: bool = False
) -> None:
    arguments = (q, pages.keys, pages.values, pages.table, row_slots, row_num_keys, kv_index)
    scale = float(inverse_sqrt(q.shape[2]))
    expected = paged_attention(*arguments, scale, dtype)
    assert any_nan or np.isfinite(expected).all(), "nothing that a row may not see is a number"
    for _ in machines():
        assert_same_bits(_C.attention(*arguments, scale, dtype), expected, any_nan=any_nan)


@pytest.mark.parametrize("kind", ["plain", "tied", "subnormal", "zeros"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_borders_of_blocks_and_segments(kind: str, dtype: str) -> None:
    pages = filled_pages(max(BORDERS), 1, 8, 64, dtype, kind)
    q = numbers("q", (len(BORDERS), 1, 8), kind)
    slots = np.array([i % 2 for i in range(len(BORDERS))], dtype=np.int32)
    group = np.zeros(1, dtype=np.int32)
    assert_attends_as_oracle(q, pages, slots, np.array(BORDERS, dtype=np.int32), group, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 12, 32, 64, 80, 128])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_head_widths_and_page_sizes(dtype: str, head_dim: int, page_size: int) -> None:
    """Four query heads over KV heads in an irregular map, as a rank may hold them."""
    num_keys = np.array([1, 17, 70], dtype=np.int32)
    pages = filled_pages(70, 3, head_dim, page_size, dtype, "plain")
    q = numbers("q", (3, 4, head_dim))
    assert_attends_as_oracle(
        q, pages, np.array([1, 0, 1], dtype=np.int32), num_keys, np.array([0, 0, 2, 1], dtype=np.int32), dtype
    )


@pytest.mark.parametrize(
    ("page_size", "head_dim", "dtype"), [(16, 32, "bfloat16"), (24, 16, "float16"), (64, 20, "float32")]
)
def test_many_queries_of_one_key_head(page_size: int, head_dim: int, dtype: str) -> None:
    """A prompt: more queries than a tile has, most of them with keys of their own number; pages that are read where
    they lie, pages that sixteen keys cross, and heads that are no whole blocks of columns."""
    num_rows, num_keys = 17, 70
    pages = filled_pages(num_keys, 2, head_dim, page_size, dtype, "plain")
    q, slots = numbers("q", (num_rows, 3, head_dim)), np.zeros(num_rows, dtype=np.int32)
    seen = np.arange(num_keys - num_rows + 1, num_keys + 1, dtype=np.int32)
    assert_attends_as_oracle(q, pages, slots, seen, np.array([1, 1, 1], dtype=np.int32), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_that_rise_and_fall_by_large_steps(dtype: str) -> None:
    """Maxima move in both directions between blocks and segments, so every rescaling is used, also to zero."""
    num_keys, head_dim = 600, 16
    pages = empty_pages(1, num_keys, 1, head_dim, 16, dtype)
    steps = integers("steps", -6, 7, (num_keys // 30,)).repeat(30).astype(np.float32)
    k = numbers("k", (num_keys, 1, head_dim)) + steps[:, None, None]
    fill(pages, 0, k, numbers("v", (num_keys, 1, head_dim), "cancelling"), dtype)
    q = numbers("q", (3, 1, head_dim)) + np.float32(2)
    counts, none = np.array([300, 517, 600], dtype=np.int32), np.zeros(3, dtype=np.int32)
    assert_attends_as_oracle(q, pages, none, counts, none[:1], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_not_finite(dtype: str) -> None:
    pages = filled_pages(90, 1, 8, 16, dtype, "plain")
    pages.values[pages.table[0, 4], 0, 3, 2:4] = narrow(np.array([np.inf, np.nan], dtype=np.float32), dtype)
    counts, none = np.array([67, 68, 90], dtype=np.int32), np.zeros(3, dtype=np.int32)
    assert_attends_as_oracle(numbers("q", (3, 1, 8)), pages, none, counts, none[:1], dtype, any_nan=True)


@pytest.mark.parametrize("kind", ["plain", "mixed"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_store_kv(kind: str, dtype: str, page_size: int) -> None:
    num_rows, num_groups, head_dim, num_pages = 9, 2, 12, 12
    k, v = (numbers(part, (num_rows, num_groups, head_dim), kind) for part in "kv")
    row_pages = permutation("rows", num_pages)[:num_rows].astype(np.int32)
    row_offsets = integers("offsets", 0, page_size, (num_rows,))
    before = empty_pages(1, num_pages * page_size - 3 * page_size, num_groups, head_dim, page_size, dtype)
    expected = before.keys.copy(), before.values.copy()
    store_kv(k, v, *expected, row_pages, row_offsets, dtype)
    for _ in machines():
        actual = before.keys.copy(), before.values.copy()
        _C.store_kv(k, v, *actual, row_pages, row_offsets, dtype)
        assert_same_bits(actual[0], expected[0])
        assert_same_bits(actual[1], expected[1])
