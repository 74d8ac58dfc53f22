"""A transport that is late at random: the same results and counts as the one inside."""

from __future__ import annotations

import time

import pytest
import torch
from leafsum.collectives.delays import DelayedTransport
from leafsum.collectives.testing import run_ranks
from leafsum.collectives.transport import SingleRank, Transport


def test_it_moves_what_the_transport_inside_moves():
    def calls_on_rank(inner: Transport) -> tuple[list[list[int]], int, int]:
        transport = DelayedTransport(inner, seed=5)
        gathered = [transport.all_gather(torch.tensor([inner.rank, step])).flatten().tolist() for step in range(40)]
        gathered.append(transport.broadcast(torch.tensor([inner.rank + 7]), root=1).tolist())
        gathered += [part.tolist() for part in transport.all_gather_unequal(torch.full((inner.rank,), 3), [0, 1, 2])]
        transport.barrier()
        return gathered, transport.stats.all_gather.calls, inner.stats.num_delays

    for gathered, calls, num_delays in run_ranks(3, calls_on_rank):
        assert gathered == [[0, step, 1, step, 2, step] for step in range(40)] + [[8], [], [3], [3, 3]]
        assert calls == 41
        assert 0 < num_delays < 20


def test_ranks_and_seeds_are_late_at_different_calls(monkeypatch: pytest.MonkeyPatch):
    def late_calls(seed: int, rank: int) -> list[int]:
        inner = SingleRank()
        inner.rank = rank
        transport = DelayedTransport(inner, seed)
        slept: list[float] = []
        monkeypatch.setattr(time, "sleep", slept.append)
        late = []
        for call in range(400):
            before = len(slept)
            transport.barrier()
            late += [call] * (len(slept) - before)
        assert all(0 <= seconds <= 0.002 for seconds in slept)
        assert transport.stats.num_delays == len(late)
        return late

    found = [late_calls(seed, rank) for seed, rank in ((1, 0), (1, 1), (2, 0))]
    assert all(20 < len(late) < 100 for late in found)
    assert found[0] != found[1] != found[2] != found[0]
    assert late_calls(1, 0) == found[0]
