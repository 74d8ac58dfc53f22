"""The time that a rank spends in calls of its transport: counted around them, and nowhere else."""

import itertools

import pytest
import torch
from leafsum.collectives import transport
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
