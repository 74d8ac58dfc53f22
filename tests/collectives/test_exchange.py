"""The exchange: slots = nodes = reference, bit for bit, on every rank, for any placement; and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bits import assert_same_bits, bit_patterns
from collectives.layouts import Slots, make_slots, placements, slots
from hypothesis import given, settings
from hypothesis import strategies as st
from leafsum.collectives.exchange import Exchange
from leafsum.collectives.placement import Placement
from leafsum.collectives.reference import reference_sum
from leafsum.collectives.testing import run_ranks
from leafsum.collectives.transport import SingleRank, Transport
from leafsum.collectives.tree import CanonicalTree

NAN = np.float32(np.nan)
TREE = CanonicalTree(128, 8, has_shared=True)


def owned_rows(placement: Placement, rank: int, drawn: Slots) -> np.ndarray:
    """The rows this rank has computed; NaN, which must never be read, everywhere else."""
    owners = np.array([*placement.owners, -1])
    return np.where((owners[drawn.ids] == rank)[:, :, None], drawn.rows, NAN)


def sums_of_all_ranks(placement: Placement, mode: str, drawn: Slots) -> list[np.ndarray]:
    def sum_on_rank(transport: Transport) -> np.ndarray:
        exchange = Exchange(placement, transport.rank, transport, mode, drawn.top_k)
        rows = owned_rows(placement, transport.rank, drawn)
        return exchange.sum(torch.from_numpy(rows), torch.from_numpy(drawn.ids)).numpy()

    return run_ranks(placement.num_ranks, sum_on_rank)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_both_modes_equal_the_reference_on_every_rank(data):
    placement = data.draw(placements())
    drawn = data.draw(slots(placement.tree))
    expected = reference_sum(drawn.rows, drawn.ids, placement.tree)
    for mode in ("slots", "nodes"):
        for actual in sums_of_all_ranks(placement, mode, drawn):
            assert_same_bits(actual, expected)


def test_the_drawn_values_can_tell_one_order_from_another():
    drawn = make_slots(TREE, top_k=8, num_rows=64, hidden=8, seed=1)
    expected = reference_sum(drawn.rows, drawn.ids, TREE)
    chain = np.zeros_like(expected)
    for slot in range(drawn.ids.shape[1]):
        chain += np.where(drawn.ids[:, slot : slot + 1] >= 0, drawn.rows[:, slot], np.float32(0))
    different_rows = (bit_patterns(chain) != bit_patterns(expected)).any(axis=1)
    assert different_rows.mean() > 0.5


def test_the_reference_adds_in_the_order_of_the_page():
    # Leaf 0 (ids 0..7): (1 + 2^24) - 2^24 = 0. Leaf 1 (ids 8, 9, shared 10): (0.5 + 2^24) - 2^24 = 0.
    tree = CanonicalTree(10, 8, has_shared=True)
    big = 2.0**24
    rows = np.array([1, big, -big, 0.5, big, -big], dtype=np.float32).reshape(1, 6, 1)
    ids = np.array([[0, 3, 7, 8, 9, 10]], dtype=np.int32)
    assert reference_sum(rows, ids, tree).tolist() == [[0.0]]
    assert reference_sum(rows[:, [0, 1, 3, 4, 2, 5]], ids[:, [0, 1, 3, 4, 2, 5]], tree).tolist() == [[0.0]]
    assert reference_sum(rows[:, [3, 0]], np.array([[8, 0]], dtype=np.int32), tree).tolist() == [[1.5]]


@pytest.mark.parametrize("mode", ["slots", "nodes"])
def test_a_sum_of_negative_zeros_is_positive_zero(mode):
    placement = Placement.strided(TREE, 3)
    drawn = Slots(np.full((2, 4, 3), -0.0, np.float32), np.array([[1, 2, 9, 128], [-1, -1, -1, -1]], np.int32), 3)
    for actual in sums_of_all_ranks(placement, mode, drawn):
        assert_same_bits(actual, np.zeros((2, 3), np.float32))


@pytest.mark.parametrize("mode", ["slots", "nodes"])
def test_rows_whose_slots_all_lie_on_one_rank(mode):
    placement = Placement.contiguous(TREE, 4)
    drawn = make_slots(TREE, top_k=3, num_rows=2, hidden=5, seed=2)
    drawn.ids[:] = [[0, 1, 9, -1], [2, 8, 10, -1]]  # rank 0 alone
    expected = reference_sum(drawn.rows, drawn.ids, TREE)
    for actual in sums_of_all_ranks(placement, mode, drawn):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("mode", ["slots", "nodes", "auto"])
def test_fewer_attention_leaves_than_ranks(mode):
    tree = CanonicalTree(4, ids_per_leaf=1)
    placement = Placement.contiguous(tree, 6)
    drawn = make_slots(tree, top_k=4, num_rows=3, hidden=5, seed=3)
    drawn.ids[:] = np.arange(4)
    expected = reference_sum(drawn.rows, drawn.ids, tree)
    for actual in sums_of_all_ranks(placement, mode, drawn):
        assert_same_bits(actual, expected)


def test_one_rank_travels_nothing():
    transport = SingleRank()
    exchange = Exchange(Placement.contiguous(TREE, 1), 0, transport, "auto", 8)
    drawn = make_slots(TREE, top_k=8, num_rows=5, hidden=7, seed=4)
    actual = exchange.sum(torch.from_numpy(drawn.rows), torch.from_numpy(drawn.ids))
    assert_same_bits(actual.numpy(), reference_sum(drawn.rows, drawn.ids, TREE))
    assert (exchange.num_exchanges, transport.stats.bytes_sent, transport.stats.bytes_received) == (0, 0, 0)


def test_a_step_without_rows_travels_nothing():
    def sum_nothing(transport: Transport) -> tuple[list[int], int, int]:
        exchange = Exchange(Placement.contiguous(TREE, 2), transport.rank, transport, "nodes", 8)
        sums = exchange.sum(torch.empty(0, 9, 16), torch.empty(0, 9, dtype=torch.int32))
        return list(sums.shape), exchange.num_exchanges, transport.stats.bytes_sent

    assert run_ranks(2, sum_nothing) == [([0, 16], 0, 0)] * 2


def test_strided_memory_is_taken_as_it_is():
    drawn = make_slots(TREE, top_k=8, num_rows=4, hidden=6, seed=5)
    exchange = Exchange(Placement.contiguous(TREE, 1), 0, SingleRank(), "auto", 8)
    rows = torch.from_numpy(drawn.rows.swapaxes(0, 1).copy()).transpose(0, 1)
    ids = torch.from_numpy(drawn.ids.T.copy()).T
    assert_same_bits(exchange.sum(rows, ids).numpy(), reference_sum(drawn.rows, drawn.ids, TREE))


@pytest.mark.parametrize(
    ("placement", "top_k", "rows", "mode"),
    [
        (Placement.contiguous(TREE, 2), 8, {"slots": 9, "nodes": 1}, "nodes"),
        (Placement.contiguous(TREE, 3), 8, {"slots": 9, "nodes": 3}, "nodes"),
        (Placement.strided(TREE, 3), 8, {"slots": 9, "nodes": 9}, "nodes"),  # a tie
        (Placement.contiguous(CanonicalTree(512), 3), 1, {"slots": 1, "nodes": 5}, "slots"),
        (Placement.contiguous(CanonicalTree(8, 1), 3), 8, {"slots": 3, "nodes": 2}, "nodes"),
        # Rank 0 owns leaf 0 whole and id 8 of leaf 1; ranks 1 and 2 share the rest of leaf 1.
        (Placement(CanonicalTree(12), 3, (0,) * 9 + (1, 1, 2)), 2, {"slots": 2, "nodes": 3}, "slots"),
    ],
)
def test_auto_takes_the_fewer_padded_rows(placement, top_k, rows, mode):
    def resolve(transport: Transport) -> tuple[dict[str, int], str]:
        exchange = Exchange(placement, transport.rank, transport, "auto", top_k)
        return exchange.rows_per_token(), exchange.mode

    assert run_ranks(placement.num_ranks, resolve) == [(rows, mode)] * placement.num_ranks


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_no_rank_sends_more_rows_than_counted(data):
    placement = data.draw(placements().filter(lambda placement: placement.num_ranks > 1))
    drawn = data.draw(slots(placement.tree))

    def bytes_sent(transport: Transport, mode: str) -> int:
        exchange = Exchange(placement, transport.rank, transport, mode, drawn.top_k)
        rows = torch.from_numpy(owned_rows(placement, transport.rank, drawn))
        exchange.sum(rows, torch.from_numpy(drawn.ids))
        return transport.stats.bytes_sent

    num_rows, _, hidden = drawn.rows.shape
    for mode, rows_per_token in placement.rows_per_token(drawn.top_k).items():
        most = num_rows * rows_per_token * hidden * 4 * (placement.num_ranks - 1)
        sent = run_ranks(placement.num_ranks, lambda transport, mode=mode: bytes_sent(transport, mode))
        assert max(sent) <= most


def test_nodes_sends_one_row_a_token_where_a_subtree_is_owned():
    drawn = make_slots(CanonicalTree(128), top_k=8, num_rows=5, hidden=16, seed=6)
    placement = Placement.contiguous(CanonicalTree(128), 4)

    def count(transport: Transport) -> tuple[int, int, int, int]:
        exchange = Exchange(placement, transport.rank, transport, "auto", 8)
        exchange.sum(torch.from_numpy(drawn.rows), torch.from_numpy(drawn.ids))
        stats = transport.stats
        return exchange.num_exchanges, stats.all_gather.calls, stats.bytes_sent, stats.bytes_received

    num_bytes = 5 * 1 * 16 * 4 * 3
    assert run_ranks(4, count) == [(1, 1, num_bytes, num_bytes)] * 4


def an_exchange(mode: str = "slots", rank: int = 0, num_ranks: int = 1) -> Exchange:
    return Exchange(Placement.contiguous(TREE, num_ranks), rank, SingleRank(), mode, 8)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: an_exchange(mode="ring"), "exchange mode of slots, nodes, auto, found 'ring'"),
        (lambda: an_exchange(num_ranks=2), "transport of rank 0 of 2.*found one of rank 0 of 1"),
        (lambda: an_exchange(rank=1), "transport of rank 1 of 1.*found one of rank 0 of 1"),
        (lambda: _sum(rows_dtype=torch.float64), r"slot_rows float32 \[M, S, H\], found float64 \[2, 3, 4\]"),
        (lambda: _sum(ids_dtype=torch.int64), r"slot_ids int32 \[2, 3\], found int64 \[2, 3\]"),
        (lambda: _sum(ids_shape=(3, 2)), r"slot_ids int32 \[2, 3\], found int32 \[3, 2\]"),
        (lambda: _sum(first_id=129), "slot_ids: expected values -1 to 128, found 129"),
        (lambda: _sum(first_id=-2), "slot_ids: expected values -1 to 128, found -2"),
    ],
)
def test_what_does_not_fit_is_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def _sum(rows_dtype=torch.float32, ids_dtype=torch.int32, ids_shape=(2, 3), first_id=0):
    ids = torch.zeros(ids_shape, dtype=ids_dtype)
    ids[0, 0] = first_id
    return an_exchange().sum(torch.zeros(2, 3, 4, dtype=rows_dtype), ids)
