"""Control sums: wrong as their name says, alike on every rank but for one of them, and other bits than the tree's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from bits import assert_same_bits, bit_patterns
from collectives.layouts import Slots
from leafsum.collectives.control_names import CONTROLS, FLIPPED_BIT, NO_CONTROL, OTHER_ORDERS, SPOILED_ROWS
from leafsum.collectives.controls import ControlExchange
from leafsum.collectives.exchange import Exchange
from leafsum.collectives.placement import Placement
from leafsum.collectives.reference import reference_sum
from leafsum.collectives.testing import run_ranks
from leafsum.collectives.transport import Transport
from leafsum.collectives.tree import CanonicalTree
from leafsum.ranks.numerics import settings_digest
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


def sums_of_all_ranks(control: str, mode: str = "slots", placement: Placement = PLACEMENT) -> list[list[F32]]:
    """The first sums of a run, on every rank."""
    slots, weights = drawn()
    owners = np.array([*placement.owners, -1])

    def sums_on_rank(transport: Transport) -> list[F32]:
        exchange = ControlExchange(control, placement, transport.rank, transport, mode, TOP_K)
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


def test_the_right_sum_is_no_control():
    assert NO_CONTROL not in CONTROLS
    assert settings_digest({"control": NO_CONTROL}) == settings_digest({})


WRONG_ALIKE = [
    *((control, "slots", PLACEMENT) for control in OTHER_ORDERS),
    *((control, "slots", PLACEMENT) for control in SPOILED_ROWS),
    *((control, "nodes", PLACEMENT) for control in SPOILED_ROWS),
    *((control, "nodes", Placement.strided(TREE, NUM_RANKS)) for control in SPOILED_ROWS),
]


@pytest.mark.parametrize(("control", "mode", "placement"), WRONG_ALIKE)
def test_a_control_is_wrong_alike_on_every_rank_and_for_every_token_in_time(control, mode, placement):
    first, *others = sums_of_all_ranks(control, mode, placement)
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
def test_rows_of_tokens_are_lost_or_added_twice(control, factor):
    """Every token's sum is one with some of its rows lost or doubled, and in most sums it has such a row."""
    slots, _ = drawn()
    possible = [sums_with_rows_times(slots, row, np.float32(factor)) for row in range(len(slots.ids))]
    spoiled = []
    for found in sums_of_all_ranks(control)[0]:
        spoiled.append([possible[row].get(found[row].tobytes()) for row in range(len(found))])
    assert all(num is not None for each in spoiled for num in each)
    assert np.mean([num > 0 for each in spoiled for num in each]) > 0.5


def sums_with_rows_times(slots: Slots, row: int, factor: np.float32) -> dict[bytes, int]:
    """The sum of one token for up to three spoiled slots, and how many are."""
    found = {}
    for num_spoiled in (3, 2, 1, 0):
        for spoiled in itertools.combinations(range(TOP_K), num_spoiled):
            rows = slots.rows[row : row + 1].copy()
            rows[0, list(spoiled)] *= factor
            found[reference_sum(rows, slots.ids[row : row + 1], TREE)[0].tobytes()] = num_spoiled
    return found


@pytest.mark.parametrize(("control", "factor"), [("dropped-row", 0), ("doubled-row", 2)])
def test_exchanged_nodes_are_lost_or_added_twice(control, factor, monkeypatch):
    """What ranks gather is what they gather in mode nodes, but for about a row a token, other ones in every sum."""
    gathered: list[list[F32]] = []
    gather = Exchange._gather

    def gather_and_keep(self: Exchange, part: F32, counts: list[int]) -> list[F32]:
        parts = gather(self, part, counts)
        if self.rank == 0:
            gathered.append([each.copy() for each in parts])
        return parts

    monkeypatch.setattr(Exchange, "_gather", gather_and_keep)
    spoiled: list[list[F32]] = []
    control_gather = ControlExchange._gather

    def gather_spoiled(self: ControlExchange, part: F32, counts: list[int]) -> list[F32]:
        parts = control_gather(self, part, counts)
        if self.rank == 0:
            spoiled.append(parts)
        return parts

    monkeypatch.setattr(ControlExchange, "_gather", gather_spoiled)
    sums_of_all_ranks(control, "nodes")
    places = set()
    num_cover = sum(len(PLACEMENT.cover(rank)) for rank in range(NUM_RANKS))
    for whole, wrong in zip(gathered, spoiled, strict=True):
        before, after = np.concatenate(whole), np.concatenate(wrong)
        assert len(before) >= 6 * num_cover
        wrong_places = np.unique(np.argwhere(bit_patterns(before) != bit_patterns(after))[:, 0])
        assert 6 <= len(wrong_places) <= 12
        assert_same_bits(after[wrong_places], before[wrong_places] * np.float32(factor))
        places.update(wrong_places.tolist())
    assert len(places) > len(before) / 2


@pytest.mark.parametrize(("control", "mode"), [*((each, "slots") for each in OTHER_ORDERS), ("dropped-row", "nodes")])
def test_what_travels_is_said_as_it_is(control, mode):
    def mode_on_rank(transport: Transport) -> str:
        return ControlExchange(control, PLACEMENT, transport.rank, transport, "nodes", TOP_K).mode

    assert run_ranks(NUM_RANKS, mode_on_rank) == [mode] * NUM_RANKS


@pytest.mark.parametrize("mode", ["slots", "nodes"])
def test_one_bit_of_one_element_is_flipped_once_on_the_last_rank(mode):
    *others, last = sums_of_all_ranks(FLIPPED_BIT, mode)
    for sums in others:
        for each in sums:
            assert_same_bits(each, canonical())
    flipped = [np.bitwise_count(bit_patterns(each) ^ bit_patterns(canonical())).sum() for each in last]
    assert flipped == [0, 1] + [0] * (NUM_SUMS - 2)


def test_an_unknown_control_is_refused():
    with pytest.raises(ValueError, match=r"expected a control of pick-order, .*, found 'chain'"):
        run_ranks(
            1, lambda transport: ControlExchange("chain", Placement.contiguous(TREE, 1), 0, transport, "slots", 8)
        )
