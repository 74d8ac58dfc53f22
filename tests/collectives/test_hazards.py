"""Hazard counts: ties at the border of the chosen, on another rank; subnormals and negative zeros of owned rows."""

from __future__ import annotations

import numpy as np
import torch
from leafsum.collectives.exchange import Exchange
from leafsum.collectives.hazards import HazardCounts
from leafsum.collectives.placement import Placement
from leafsum.collectives.testing import run_ranks
from leafsum.collectives.transport import Transport
from leafsum.collectives.tree import CanonicalTree


def test_elements_are_counted_by_their_bits():
    counts = HazardCounts()
    smallest_normal = np.float32(2.0**-126)
    values = [0.0, -0.0, 1e-45, -1e-40, np.nextafter(smallest_normal, np.float32(0)), smallest_normal, np.nan, -np.inf]
    counts.count_rows(np.array([[values]], dtype=np.float32))
    assert counts.as_dict() == {"router_ties": 0, "subnormals": 3, "negative_zeros": 1}


def test_a_tie_is_one_only_across_ranks_and_across_the_border_of_the_chosen():
    owners = np.array([0, 0, 1, 1], dtype=np.int32)
    cases = [
        ([0.4, 0.3, 0.3, 0.0], [0, 1], 1),  # 1 is chosen and on rank 0, 2 is not and on rank 1
        ([0.4, 0.3, 0.3, 0.0], [1, 2], 0),  # both are chosen; the one left out is heavier
        ([0.3, 0.3, 0.4, 0.0], [0, 2], 0),  # the tie is within rank 0
        ([0.4, 0.3, 0.2, 0.1], [0, 1], 0),
        ([0.25, 0.25, 0.25, 0.25], [0, 1], 1),  # one row, however many experts tie
    ]
    for probabilities, chosen, expected in cases:
        counts = HazardCounts()
        counts.count_ties(np.array([probabilities], np.float32), np.array([chosen], np.int32), owners)
        assert counts.router_ties == expected, (probabilities, chosen)


def test_an_exchange_counts_the_rows_its_rank_owns_and_no_others():
    tree = CanonicalTree(16)
    ids = np.array([[1, 9], [3, -1]], dtype=np.int32)
    rows = np.full((2, 2, 4), -0.0, dtype=np.float32)

    def count_on_rank(transport: Transport) -> dict[str, int]:
        counts = HazardCounts()
        placement = Placement.contiguous(tree, transport.num_ranks)
        exchange = Exchange(placement, transport.rank, transport, "nodes", 2, counts)
        exchange.sum(torch.from_numpy(rows), torch.from_numpy(ids))
        return counts.as_dict()

    assert [counts["negative_zeros"] for counts in run_ranks(2, count_on_rank)] == [8, 4]
    assert [counts["negative_zeros"] for counts in run_ranks(1, count_on_rank)] == [12]
