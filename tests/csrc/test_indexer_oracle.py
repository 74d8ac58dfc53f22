"""store_index_keys, select_keys and attention over lists are the oracle's, whatever the pages and the calls."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from bits import assert_same_bits
from csrc.steps import Step, cut, one_by_one, step, whole
from leafsum import _C
from machines import machine, machines
from oracle.attention import paged_attention
from oracle.indexer import pooled_keys, selected_keys
from oracle.inputs import F32, I32, KINDS, integers, numbers, permutation
from oracle.rotary import frequencies
from oracle.rounding import DTYPES, Storage, inverse_sqrt, narrow, round_to

NUM_SLOTS, NUM_ROWS = 3, 150
NO_CHOICE = -1
"""The count of a row with a score that is NaN."""

LENGTHS = {2: 150, 0: 65}
"""By slot; slot 1 stays unused."""
PLANS = {
    "whole": whole(LENGTHS),
    "one by one": one_by_one(LENGTHS),
    "cut": cut(LENGTHS, (1, 2, 9, 63, 64, 66, 127, 130)),
}
EPS, FACTOR = 1e-6, 1.25


@dataclass(frozen=True, slots=True)
class KeyPages:
    """keys [P, D, blocks_per_page], nothing in them a number at first; table [slots, pages]."""

    keys: Storage
    table: I32

    def place(self, slot: int, block: int) -> tuple[int, slice, int]:
        blocks_per_page = self.keys.shape[2]
        return int(self.table[slot, block // blocks_per_page]), slice(None), block % blocks_per_page

    def fill(self, slot: int, keys: F32, dtype: str) -> None:
        for block, key in enumerate(narrow(keys, dtype)):
            self.keys[self.place(slot, block)] = key


def empty_pages(num_blocks: int, key_dim: int, blocks_per_page: int, dtype: str) -> KeyPages:
    pages_per_slot = -(-num_blocks // blocks_per_page)
    num_pages = NUM_SLOTS * pages_per_slot + 2
    table = permutation("index pages", num_pages)[: NUM_SLOTS * pages_per_slot].astype(np.int32)
    nan = narrow(np.full((num_pages, key_dim, blocks_per_page), np.nan, dtype=np.float32), dtype)
    return KeyPages(nan, table.reshape(NUM_SLOTS, pages_per_slot))


@dataclass(frozen=True, slots=True)
class Pooling:
    block_size: int
    key_dim: int
    num_rotated: int
    blocks_per_page: int
    one_plus_weight: bool = True

    @property
    def arguments(self) -> tuple[F32, float, bool, F32, float, int]:
        """weight, eps, one_plus_weight, frequencies, attention_factor, block_size: as kernel and oracle take them."""
        weight = numbers("index norm", (self.key_dim,))
        return weight, EPS, self.one_plus_weight, frequencies(1e4, self.num_rotated), FACTOR, self.block_size

    def expected(self, raw: F32, dtype: str) -> F32:
        return pooled_keys(raw, *self.arguments, dtype)

    def store(self, raw: F32, steps: list[Step], ring: F32, pages: KeyPages, dtype: str) -> None:
        arguments = self.arguments
        for each in steps:
            rows = raw[each.slots, each.positions]
            _C.store_index_keys(rows, ring, *arguments, pages.keys, pages.table, *each.runs, dtype)


POOLINGS = {
    "published": Pooling(4, 24, 8, 16),
    "odd": Pooling(5, 19, 6, 3),
    "single": Pooling(1, 8, 8, 64),
    "plain weights": Pooling(16, 70, 64, 1, one_plus_weight=False),
}


def empty_ring(pooling: Pooling, num_rows: int) -> F32:
    return np.full((NUM_SLOTS, num_rows, pooling.key_dim), np.nan, dtype=np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", POOLINGS)
def test_pooled_keys(name: str, dtype: str) -> None:
    pooling = POOLINGS[name]
    raw = numbers("raw", (NUM_SLOTS, NUM_ROWS, pooling.key_dim))
    num_blocks = NUM_ROWS // pooling.block_size
    expected = empty_pages(num_blocks, pooling.key_dim, pooling.blocks_per_page, dtype)
    for slot, length in LENGTHS.items():
        expected.fill(slot, pooling.expected(raw[slot, :length], dtype), dtype)
    for ring_rows, plan in ((128, "whole"), (128, "one by one"), (128, "cut"), (pooling.block_size, "cut")):
        for _ in machines():
            pages = empty_pages(num_blocks, pooling.key_dim, pooling.blocks_per_page, dtype)
            pooling.store(raw, PLANS[plan], empty_ring(pooling, ring_rows), pages, dtype)
            assert_same_bits(pages.keys, expected.keys)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_raw_keys(kind: str) -> None:
    pooling, dtype = POOLINGS["odd"], "bfloat16"
    raw = numbers("raw", (NUM_SLOTS, 40, pooling.key_dim), kind)
    expected = round_to(pooling.expected(raw[0], dtype), dtype)
    for _ in machines():
        pages = empty_pages(8, pooling.key_dim, pooling.blocks_per_page, dtype)
        pooling.store(raw, cut({0: 40}, (13,)), empty_ring(pooling, 128), pages, dtype)
        found = np.stack([_C.widen(pages.keys[pages.place(0, block)].copy(), dtype) for block in range(8)])
        assert_same_bits(found, expected, any_nan=kind == "special")


@pytest.mark.parametrize("back_to", [86, 101, 149])
def test_going_back(back_to: int) -> None:
    """By at most 64 rows and on with others: blocks that were cut or gone are those of the rows that stand now."""
    pooling, dtype = POOLINGS["odd"], "float16"
    raw = numbers("raw", (NUM_SLOTS, NUM_ROWS, pooling.key_dim))
    final = raw.copy()
    final[2, back_to:] = numbers("other", (NUM_ROWS - back_to, pooling.key_dim))
    expected = narrow(pooling.expected(final[2], dtype), dtype)
    for instruction_set in _C.instruction_sets():
        with machine(instruction_set, 2):
            pages, ring = empty_pages(30, pooling.key_dim, 3, dtype), empty_ring(pooling, 128)
            pooling.store(raw, PLANS["cut"], ring, pages, dtype)
            pooling.store(
                final,
                [step((2, back_to, back_to + 1)), step((2, back_to + 1, 150))][: 150 - back_to],
                ring,
                pages,
                dtype,
            )
        found = np.stack([pages.keys[pages.place(2, block)] for block in range(30)])
        assert_same_bits(found, expected)


@dataclass(frozen=True, slots=True)
class Choice:
    num_heads: int
    key_dim: int
    block_size: int
    budget: int
    blocks_per_page: int

    @property
    def scale(self) -> float:
        return float(inverse_sqrt(self.key_dim))


CHOICES = {
    "published": Choice(4, 24, 4, 32, 16),
    "odd": Choice(5, 19, 5, 15, 7),
    "one head, one block": Choice(1, 8, 3, 3, 1),
    "many heads": Choice(9, 16, 2, 60, 64),
    "every key a block": Choice(3, 10, 1, 9, 32),
}


def assert_selects_as_oracle(choice: Choice, q: F32, keys: F32, slots: I32, positions: I32, dtype: str) -> I32:
    """keys [slots, blocks, D] holding values of dtype; the counts that both find."""
    pages = empty_pages(keys.shape[1], choice.key_dim, choice.blocks_per_page, dtype)
    for slot in range(NUM_SLOTS):
        pages.fill(slot, keys[slot, : max(int(p) + 1 for p in positions) // choice.block_size], dtype)
    sizes = choice.block_size, choice.budget, choice.scale, dtype
    lists = [
        selected_keys(row, keys[slot], int(position), *sizes)
        for row, slot, position in zip(q, slots, positions, strict=True)
    ]
    expected = [of_row or [] for of_row in lists]
    expected_counts = [0 if of_row is None else len(of_row) or NO_CHOICE for of_row in lists]
    for _ in machines():
        selected, counts = _C.select_keys(q, pages.keys, pages.table, slots, positions, *sizes)
        assert selected.shape == (len(q), choice.budget + choice.block_size - 1)
        assert counts.tolist() == expected_counts
        assert [of_row[: max(count, 0)].tolist() for of_row, count in zip(selected, counts, strict=True)] == expected
    return counts


def rows_around(choice: Choice) -> I32:
    """Positions from the first on: no block, as many as the budget, one more with every tail, and many."""
    dense = choice.budget + choice.block_size
    around = [0, choice.block_size - 1, dense - 2, *range(dense - 1, dense + choice.block_size)]
    return np.array([*around, 3 * dense, 4 * dense + 1, choice.block_size * 150 - 1], dtype=np.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CHOICES)
def test_selected_keys(name: str, dtype: str) -> None:
    choice, positions = CHOICES[name], rows_around(CHOICES[name])
    q = numbers("q", (len(positions), choice.num_heads, choice.key_dim))
    keys = round_to(numbers("keys", (NUM_SLOTS, 150, choice.key_dim)), dtype)
    slots = integers("slots", 0, NUM_SLOTS, (len(positions),))
    counts = assert_selects_as_oracle(choice, q, keys, slots, positions, dtype)
    assert (counts == 0).sum() == 3, "rows that see every key"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "plain"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ties_and_kinds_of_numbers(kind: str, dtype: str) -> None:
    """Of equal scores the lower block, also where all are zero and where all are infinite."""
    choice, positions = CHOICES["odd"], np.arange(30, 150, 9, dtype=np.int32)
    q = numbers("q", (len(positions), choice.num_heads, choice.key_dim), kind)
    q[1], q[2] = 0, np.nan
    keys = round_to(numbers("keys", (NUM_SLOTS, 30, choice.key_dim), kind), dtype)
    assert_selects_as_oracle(choice, q, keys, integers("slots", 0, NUM_SLOTS, (len(q),)), positions, dtype)


def test_equal_blocks_are_taken_from_the_front() -> None:
    choice, positions = CHOICES["published"], np.array([150], dtype=np.int32)
    q = np.ones((1, choice.num_heads, choice.key_dim), dtype=np.float32)
    pages = empty_pages(38, choice.key_dim, 16, "float32")
    pages.fill(0, np.ones((38, choice.key_dim), dtype=np.float32), "float32")
    slots = np.zeros(1, dtype=np.int32)
    for _ in machines():
        selected, counts = _C.select_keys(
            q, pages.keys, pages.table, slots, positions, 4, choice.budget, choice.scale, "float32"
        )
        assert selected[0, : counts[0]].tolist() == [*range(32), 148, 149, 150]


@pytest.mark.parametrize("q", [np.eye(3, dtype=np.float32), np.ones((1, 3), dtype=np.float32)])
def test_sums_that_only_their_order_makes_equal(q: F32) -> None:
    """Over heads, and over the elements of one head: (2^24 + 1) + 1 is 2^24, so the lower block ties and is taken."""
    keys = np.array([[2.0**24, 0, 0], [2.0**24, 1, 1]], dtype=np.float32)
    table, position = np.zeros((1, 1), dtype=np.int32), np.ones(1, dtype=np.int32)
    pages = np.ascontiguousarray(keys.T[None])
    for _ in machines():
        selected, counts = _C.select_keys(q[None], pages, table, table[0], position, 1, 1, 1.0, "float32")
        assert selected.tolist() == [[0]]
        assert counts.tolist() == [1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 32), (7, 20), (64, 8)])
def test_attention_over_lists(page_size: int, head_dim: int, dtype: str) -> None:
    """Rows with a list and rows without one in a call; lists across blocks and segments. What no row lists is NaN."""
    num_keys, kv_index = 400, np.array([1, 0, 1], dtype=np.int32)
    counts = np.array([1, 0, 63, 64, 65, 0, 255, 256, 257, 300], dtype=np.int32)
    seen = np.array([400, 70, 400, 399, 400, 33, 380, 400, 400, 400], dtype=np.int32)
    listable = np.sort(permutation("listable", num_keys)[:300])
    selected = np.full((len(counts), 310), -7, dtype=np.int32)
    for row, count in enumerate(counts):
        below = listable[listable < seen[row]]
        chosen = permutation(f"list {row}", len(below))[:count]
        selected[row, : len(chosen)] = np.sort(below[chosen])
        counts[row] = len(chosen)
    hidden = np.setdiff1d(np.arange(70, num_keys), listable)
    k, v = (numbers(part, (num_keys, 2, head_dim)) for part in "kv")
    k[hidden], v[hidden] = np.nan, np.nan
    table = permutation("pages", -(-num_keys // page_size)).astype(np.int32)[None]
    key_pages, value_pages = stored(k, v, table[0], page_size, dtype)
    q, slots = numbers("q", (len(counts), 3, head_dim)), np.zeros(len(counts), dtype=np.int32)
    arguments = (q, key_pages, value_pages, table, slots, seen, kv_index, float(inverse_sqrt(head_dim)), dtype)
    expected = paged_attention(*arguments, selected, counts)
    assert np.isfinite(expected).all()
    for _ in machines():
        assert_same_bits(_C.attention(*arguments, selected, counts), expected)


def stored(k: F32, v: F32, pages: I32, page_size: int, dtype: str) -> tuple[Storage, Storage]:
    """k, v [n, G, D] in pages of one slot."""
    positions = np.arange(len(k), dtype=np.int32)
    nan = narrow(np.full((len(pages), k.shape[1], k.shape[2], page_size), np.nan, dtype=np.float32), dtype)
    keys, values = nan, np.ascontiguousarray(nan.swapaxes(2, 3))
    _C.store_kv(k, v, keys, values, pages[positions // page_size], positions % page_size, dtype)
    return keys, values


def test_a_list_of_every_key_is_no_list() -> None:
    """Sparse and dense are the same while the budget holds every block."""
    table, num_keys = np.arange(20, dtype=np.int32)[None], 310
    k, v, q = (numbers(part, (num_keys, 1, 12)) for part in "kvq")
    pages = stored(k, v, table[0], 16, "bfloat16")
    slots, seen = np.zeros(num_keys, dtype=np.int32), np.arange(1, num_keys + 1, dtype=np.int32)
    arguments = (q, *pages, table, slots, seen, slots[:1], 0.3, "bfloat16")
    everything = np.tile(np.arange(num_keys, dtype=np.int32), (num_keys, 1))
    for _ in machines():
        assert_same_bits(_C.attention(*arguments, everything, seen), _C.attention(*arguments))
