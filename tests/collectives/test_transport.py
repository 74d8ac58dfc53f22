"""Transports in one process: what is gathered, counted, padded and refused."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from bits import assert_same_bits
from leafsum.collectives.testing import run_ranks
from leafsum.collectives.transport import SingleRank, Transport
from leafsum.errors import DeadlineExceeded, LeafsumError

DTYPES = [torch.float32, torch.bfloat16, torch.uint16, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
def test_unequal_parts_arrive_whole_and_in_rank_order(dtype):
    counts = [2, 0, 3]

    def gather(transport: Transport) -> list[list[object]]:
        part = torch.full((counts[transport.rank], 2), transport.rank % 2, dtype=dtype)
        return [gathered.tolist() for gathered in transport.all_gather_unequal(part, counts)]

    values = [torch.full((count, 2), rank % 2, dtype=dtype).tolist() for rank, count in enumerate(counts)]
    assert run_ranks(3, gather) == [values] * 3


def test_padding_is_nan_and_counts_as_travelled():
    class Recorder(SingleRank):
        def all_gather(self, part: torch.Tensor) -> torch.Tensor:
            self.sent = part
            return torch.stack([part, part])

    transport = Recorder()
    transport.num_ranks = 2
    own, other = transport.all_gather_unequal(torch.ones(1, 3), [1, 4])
    assert (own.shape, other.shape) == ((1, 3), (4, 3))
    assert_same_bits(transport.sent[1:].numpy().view(np.uint32), np.full((3, 3), 0xFFFFFFFF, np.uint32))


def test_counts_are_of_payload_bytes_by_kind():
    def use_all(transport: Transport) -> dict[str, dict[str, int]]:
        transport.all_gather(torch.zeros(5, 2))
        transport.all_gather_unequal(torch.zeros(transport.rank, 3), [0, 1, 2])
        transport.broadcast(torch.zeros(7, dtype=torch.uint8), root=1)
        transport.barrier()
        transport.all_gather(torch.zeros(0, 4))
        return transport.stats.as_dict()

    gathered = {"calls": 2, "bytes_sent": 2 * (40 + 24), "bytes_received": 2 * (40 + 24)}
    barrier = {"calls": 1, "bytes_sent": 0, "bytes_received": 0}
    for rank, stats in enumerate(run_ranks(3, use_all)):
        broadcast = {"calls": 1, "bytes_sent": 14 * (rank == 1), "bytes_received": 7 * (rank != 1)}
        assert stats == {"all_gather": gathered, "broadcast": broadcast, "barrier": barrier}


def test_broadcast_brings_the_roots_payload():
    def receive(transport: Transport) -> tuple[list[int], list[int]]:
        payload = torch.tensor([transport.rank, 7])
        return transport.broadcast(payload, root=2).tolist(), payload.tolist()

    assert run_ranks(3, receive) == [([2, 7], [rank, 7]) for rank in range(3)]


def test_counts_that_do_not_fit_the_part_are_refused():
    with pytest.raises(
        ValueError, match=r"counts of 1 ranks and a part of counts\[0\] rows on rank 0.*\[2\].*\[3, 1\]"
    ):
        SingleRank().all_gather_unequal(torch.zeros(3, 1), [2])


def test_a_single_rank_has_only_itself():
    transport = SingleRank()
    part = torch.arange(3)
    assert transport.all_gather(part).tolist() == [[0, 1, 2]]
    assert [gathered.tolist() for gathered in transport.all_gather_unequal(part, [3])] == [[0, 1, 2]]
    assert transport.broadcast(part, root=0) is part
    with pytest.raises(ValueError, match="root 0 in a gang of one rank, found 1"):
        transport.broadcast(part, root=1)
    transport.barrier()
    transport.close()
    assert transport.stats.bytes_sent == 0


def test_the_first_error_of_a_rank_is_raised_and_releases_the_others():
    def fail_on_rank_1(transport: Transport) -> None:
        if transport.rank == 1:
            raise KeyError("lost")
        transport.barrier()

    start_s = time.monotonic()
    with pytest.raises(KeyError, match="lost") as caught:
        run_ranks(3, fail_on_rank_1)
    assert caught.value.__notes__ == ["on rank 1 of 3"]
    assert time.monotonic() - start_s < 30  # far below the 60 s deadline of a wait


def test_a_rank_that_stays_away_is_a_named_deadline():
    def stay_away(transport: Transport) -> None:
        if transport.rank == 0:
            transport.barrier()

    with pytest.raises(DeadlineExceeded, match=r"barrier on rank 0 of 2 to end within 0\.05 s") as caught:
        run_ranks(2, stay_away, timeout_s=0.05)
    assert caught.value.timeout_s == 0.05


def test_a_closed_rank_releases_those_that_wait_for_it():
    def close_rank_1(transport: Transport) -> None:
        if transport.rank == 1:
            transport.close()
        else:
            transport.barrier()

    with pytest.raises(LeafsumError, match="barrier on rank 0 of 2 was given up: rank 1 has closed its transport"):
        run_ranks(2, close_rank_1)


def test_different_calls_on_different_ranks_are_told_apart():
    def disagree(transport: Transport) -> None:
        transport.all_gather(torch.zeros(2 + transport.rank))

    with pytest.raises(LeafsumError, match=r"one call on all ranks, found all_gather of torch.float32 \[\d\]"):
        run_ranks(2, disagree)


def test_importing_the_folder_without_its_package_fails_at_once():
    checkout = Path(__file__).parents[2]
    found = subprocess.run([sys.executable, "-c", "import collectives"], cwd=checkout, capture_output=True, text=True)
    assert found.returncode != 0
    assert "relative import" in found.stderr


def test_the_package_needs_neither_ranks_nor_runtime():
    code = (
        "import sys; import leafsum.collectives, leafsum.collectives.testing;"
        "print([name for name in sys.modules if name.startswith(('leafsum.ranks', 'leafsum.runtime'))])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_what_is_listed_is_there():
    from leafsum import collectives

    assert sorted(collectives.__all__) == collectives.__all__
    assert all(hasattr(collectives, name) for name in collectives.__all__)
