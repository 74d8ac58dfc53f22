"""The time that a rank spends in calls of its transport: counted around them, and nowhere else."""

import itertools

import pytest
import torch
from leafsum.collectives import CanonicalTree, Exchange, Placement, transport
from leafsum.collectives.testing import run_ranks
from leafsum.collectives.transport import SingleRank, TransportStats


def test_a_wait_is_counted_also_when_it_fails(monkeypatch):
    clock = itertools.count(step=5)
    monkeypatch.setattr(transport.time, "perf_counter_ns", lambda: next(clock))
    stats = TransportStats()
    with stats.waiting():
        pass
    assert stats.wait_ns == 5
    with pytest.raises(RuntimeError), stats.waiting():
        raise RuntimeError
    assert stats.wait_ns == 10


def test_every_call_waits_and_nothing_else_does():
    def function(rank_transport):
        found = [rank_transport.stats.wait_ns]
        rank_transport.all_gather(torch.ones(4))
        found.append(rank_transport.stats.wait_ns)
        rank_transport.broadcast(torch.ones(4), 0)
        found.append(rank_transport.stats.wait_ns)
        rank_transport.barrier()
        return [*found, rank_transport.stats.wait_ns]

    for found in run_ranks(2, function):
        assert found[0] == 0
        assert found == sorted(set(found))


def test_a_single_rank_waits_for_nobody():
    alone = SingleRank()
    alone.all_gather(torch.ones(4))
    alone.barrier()
    assert alone.stats.wait_ns == 0


def test_an_exchange_takes_its_calls_and_what_is_done_around_them():
    """Nothing at one rank, where no row travels."""
    rows, ids = torch.ones(3, 4, 8), torch.arange(4, dtype=torch.int32).repeat(3, 1)

    def function(rank_transport):
        placement = Placement.contiguous(CanonicalTree(4, ids_per_leaf=1), rank_transport.num_ranks)
        exchange = Exchange(placement, rank_transport.rank, rank_transport, "auto", 4)
        exchange.sum(rows, ids)
        return rank_transport.stats.wait_ns, rank_transport.stats.exchange_ns

    for wait_ns, exchange_ns in run_ranks(2, function):
        assert 0 < wait_ns < exchange_ns
    assert run_ranks(1, function) == [(0, 0)]
