"""Control sums: wrong as their name says, alike on every rank but for one of them, and other bits than the tree's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bits import assert_same_bits, bit_patterns
from collectives.layouts import Slots
from leafsum.collectives.controls import CONTROLS, FLIPPED_BIT, ControlExchange
from leafsum.collectives.placement import Placement
from leafsum.collectives.reference import reference_sum
from leafsum.collectives.testing import run_ranks
from leafsum.collectives.transport import Transport
from leafsum.collectives.tree import CanonicalTree
from leafsum.ranks import numerics
from numpy.typing import NDArray

F32 = NDArray[np.float32]

TREE = CanonicalTree(64)
NUM_RANKS, NUM_SUMS, TOP_K = 3, 12, 8
PLACEMENT = Placement.contiguous(TREE, NUM_RANKS)


def drawn() -> tuple[Slots, F32]:
    """Six tokens of eight experts each, and router weights that are not in the order of ids."""
    random = np.random.default_rng(6)
    ids = np.stack([np.sort(random.permutation(TREE.num_ids)[:TOP_K]) for _ in range(6)]).astype(np.int32)
    rows = random.standard_normal((6, TOP_K, 128), dtype=np.float32)
    return Slots(rows, ids, TOP_K), random.random((6, TOP_K), dtype=np.float32)


def sums_of_all_ranks(control: str) -> list[list[F32]]:
    """The first sums of a run, on every rank."""
    slots, weights = drawn()
    owners = np.array([*PLACEMENT.owners, -1])

    def sums_on_rank(transport: Transport) -> list[F32]:
        exchange = ControlExchange(control, PLACEMENT, transport.rank, transport, TOP_K)
        own = (owners[slots.ids] == transport.rank)[:, :, None]
        rows = torch.from_numpy(np.where(own, slots.rows, np.float32(np.nan)))
        ids = torch.from_numpy(slots.ids)
        return [exchange.sum(rows, ids, torch.from_numpy(weights)).numpy().copy() for _ in range(NUM_SUMS)]

    return run_ranks(NUM_RANKS, sums_on_rank)


def canonical() -> F32:
    slots, _ = drawn()
    return reference_sum(slots.rows, slots.ids, TREE)


def chain_of(rows: F32, order: NDArray[np.int64]) -> F32:
    total = np.zeros(rows.shape[1], dtype=np.float32)
    for slot in order:
        total += rows[slot]
    return total


def test_the_setting_names_these_controls():
    assert ("none", *CONTROLS) == numerics.CONTROLS


@pytest.mark.parametrize("control", [control for control in CONTROLS if control != FLIPPED_BIT])
def test_a_control_is_wrong_alike_on_every_rank_and_for_every_token_in_time(control):
    first, *others = sums_of_all_ranks(control)
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert_same_bits(theirs, mine)
    is_wrong = np.stack([(bit_patterns(each) != bit_patterns(canonical())).any(axis=1) for each in first])
    assert is_wrong.any(axis=0).all(), "a token that no sum gets wrong"


def test_pick_order_is_a_chain_with_the_heaviest_row_first():
    slots, weights = drawn()
    (found, *_), *_ = sums_of_all_ranks("pick-order")
    for row in range(len(found)):
        assert_same_bits(found[row], chain_of(slots.rows[row], np.argsort(-weights[row], kind="stable")))


def test_rank_chain_is_a_chain_over_the_ranks_partial_sums():
    slots, _ = drawn()
    owners = np.array([*PLACEMENT.owners, -1])[slots.ids]
    (found, *_), *_ = sums_of_all_ranks("rank-chain")
    for row in range(len(found)):
        parts = [chain_of(slots.rows[row], np.flatnonzero(owners[row] == rank)) for rank in range(NUM_RANKS)]
        assert_same_bits(found[row], chain_of(np.stack(parts), np.arange(NUM_RANKS)))


@pytest.mark.parametrize(("control", "factor"), [("dropped-row", 0), ("doubled-row", 2)])
def test_one_exchanged_row_is_lost_or_added_twice(control, factor):
    slots, _ = drawn()
    sums, *_ = sums_of_all_ranks(control)
    rows = slots.rows.copy()
    rows[1, 1] *= np.float32(factor)  # of the first sum of a run
    assert_same_bits(sums[0], reference_sum(rows, slots.ids, TREE))
    assert (bit_patterns(sums[0])[1] != bit_patterns(canonical())[1]).any()


def test_one_bit_of_one_element_is_flipped_once_on_the_last_rank():
    *others, last = sums_of_all_ranks(FLIPPED_BIT)
    for sums in others:
        for each in sums:
            assert_same_bits(each, canonical())
    flipped = [np.bitwise_count(bit_patterns(each) ^ bit_patterns(canonical())).sum() for each in last]
    assert flipped == [0, 1] + [0] * (NUM_SUMS - 2)


def test_an_unknown_control_is_refused():
    with pytest.raises(ValueError, match=r"expected a control of pick-order, .*, found 'chain'"):
        run_ranks(1, lambda transport: ControlExchange("chain", Placement.contiguous(TREE, 1), 0, transport, 8))
