"""Transports between real processes: bytes arrive unchanged, waits cost no CPU, failures are named in time."""

from __future__ import annotations

import json
import math
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from leafsum.collectives.kinds import TRANSPORTS
from leafsum.collectives.testing import RankExit, run_processes
from leafsum.errors import DeadlineExceeded, TransportError

SCRIPT = Path(__file__).with_name("process_ranks.py")
LOOPBACK = "0100007F"  # 127.0.0.1 as the kernel's table writes it


@pytest.fixture(scope="module", params=["shared", "gloo"])
def kind(request) -> str:
    return request.param


@dataclass(frozen=True, slots=True)
class Gang:
    """Three rank processes that went through all parts: what each saw, by part, and how each ended."""

    seen: list[dict[str, Any]]
    exits: list[RankExit]


@pytest.fixture(scope="module")
def gang(kind, tmp_path_factory) -> Gang:
    rendezvous, folder = tmp_path_factory.mktemp("rendezvous"), tmp_path_factory.mktemp("seen")
    arguments = {"folder": str(folder), "with_fork": kind == "shared"}
    exits = run_processes(3, SCRIPT, "live_through_all", rendezvous, 60.0, kind, **arguments)
    ends = [(rank.exit_status, rank.stderr) for rank in exits]
    assert ends == [(0, ""), (-signal.SIGKILL, ""), (0, "")]
    return Gang([json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)], exits)


def test_bytes_arrive_unchanged(kind, gang):
    patterns = [[0x7F800001 + rank, -0x80000000 + rank, 1 + rank, -1 + rank] for rank in range(3)]
    gathered = {
        "calls": 6,
        "bytes_sent": 2 * (32 + 16 + 6 + 6 + 3 + 24),
        "bytes_received": 2 * (32 + 16 + 6 + 6 + 3 + 24),
    }
    for rank, found in enumerate(each["move_bytes"] for each in gang.seen):
        assert found["equal"] == patterns
        assert found["unequal"] == [[patterns[0], patterns[0]], [], [patterns[2]]]
        assert found["dtypes"] == [[[1, 1, 1]] * 3] * 4
        assert found["empty"] == [3, 0, 5]
        assert found["broadcast"] == [1, 5]
        assert found["group_is_private"]
        assert set(found["listening"]) <= ({LOOPBACK} if kind == "gloo" else set())
        broadcast = {"calls": 1, "bytes_sent": 32 * (rank == 1), "bytes_received": 16 * (rank != 1)}
        barrier = {"calls": 1, "bytes_sent": 0, "bytes_received": 0}
        assert found["stats"] == {"all_gather": gathered, "broadcast": broadcast, "barrier": barrier}


def test_a_wait_costs_no_cpu(gang):
    for rank in (0, 2):
        waiter = gang.seen[rank]["arrive_late"]
        assert waiter["wall_s"] > 1.9
        assert waiter["cpu_s"] < 0.02
        assert waiter["calls_s"] < 50.0, "a hundred waits that end by looking at the clock"


def test_a_dead_peer_is_an_error_that_names_the_call(kind, gang):
    for rank in (0, 2):
        found = gang.exits[rank].result
        (first_kind, first_text), (_, second_text) = found["errors"]
        assert first_kind == "LeafsumError"
        assert f"{TRANSPORTS[kind].kind} all_gather of 16 bytes a rank on rank {rank} of 3 to move its" in first_text
        assert (
            f"barrier on rank {rank} of 3 was refused: an earlier all_gather of 16 bytes a rank failed" in second_text
        )
        assert found["seconds"] < 30, "half of the deadline"
        if kind == "shared":
            assert f"rank 1 (pid {found['pids'][1]}) has ended" in first_text


def test_a_hanging_peer_is_a_deadline_that_names_the_call(kind, gang):
    found = gang.seen[0]["wait_for_a_hanging_peer"]
    calls = ["all_gather of 16 bytes a rank", "broadcast of 16 bytes from rank 1", "barrier"]
    for (error_kind, text), call in zip(found["errors"], calls, strict=True):
        assert error_kind == "DeadlineExceeded"
        assert f"{TRANSPORTS[kind].kind} {call} on rank 0 of 2 to end within 0.5 s" in text
    assert 1.4 < found["seconds"] < 30


def test_a_rank_that_never_comes_is_a_named_deadline(kind, tmp_path):
    start_s = time.monotonic()
    text = rf"{TRANSPORTS[kind].kind} meeting of all ranks on rank 0 of 2 to end within 0\.5 s"
    with pytest.raises(DeadlineExceeded, match=text) as caught:
        TRANSPORTS[kind](0, 2, tmp_path / "rendezvous", timeout_s=60.0, meeting_timeout_s=0.5)
    assert time.monotonic() - start_s < 30
    assert caught.value.timeout_s == 0.5


def test_a_closed_transport_refuses_calls(kind, tmp_path):
    transport = TRANSPORTS[kind](0, 1, tmp_path / "rendezvous", timeout_s=30.0)
    transport.barrier()
    transport.close()
    transport.close()
    with pytest.raises(TransportError, match="barrier on rank 0 of 1 was refused: the transport was closed"):
        transport.barrier()


def test_a_store_in_no_folder_is_refused_at_once(kind, tmp_path):
    with pytest.raises(ValueError, match=r"store_path in an existing folder, found .*missing/rendezvous"):
        TRANSPORTS[kind](0, 1, tmp_path / "missing" / "rendezvous", timeout_s=30.0)


@pytest.mark.parametrize("rank", [-1, 2, 0.0, True])
def test_a_rank_outside_the_gang_is_refused_at_once(kind, rank, tmp_path):
    with pytest.raises(ValueError, match=rf"a rank of 0\.\.1, found {rank}"):
        TRANSPORTS[kind](rank, 2, tmp_path / "rendezvous", timeout_s=30.0)


@pytest.mark.parametrize("name", ["timeout_s", "meeting_timeout_s"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf])
def test_a_deadline_that_is_none_is_refused_at_once(kind, name, value, tmp_path):
    with pytest.raises(ValueError, match=f"expected a finite {name} above 0, found {value!r}"):
        TRANSPORTS[kind](0, 1, tmp_path / "rendezvous", **{"timeout_s": 30.0, name: value})


def test_shared_memory_leaves_nothing_when_its_processes_are_killed(tmp_path):
    before = set(Path("/dev/shm").iterdir())
    exits = run_processes(2, SCRIPT, "be_killed", tmp_path, 60.0)
    assert [rank.exit_status for rank in exits] == [-signal.SIGKILL] * 2
    assert list(tmp_path.iterdir()) == []
    assert [path for path in Path("/dev/shm").iterdir() if path not in before and "leafsum" in path.name] == []


@pytest.mark.parametrize("kind", ["shared"], indirect=True)
def test_a_forked_copy_of_a_rank_is_refused_and_harms_nobody(gang):
    assert [each["fork_a_copy"] for each in gang.seen] == [0, 0, 0]
