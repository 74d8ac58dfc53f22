"""Gloo between real processes: bytes arrive unchanged, waits cost no CPU, failures are named within their deadline.

Every test starts fresh interpreters, about two seconds of CPU each.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from leafsum.collectives.gloo import GlooTransport
from leafsum.collectives.testing import RankExit, run_processes
from leafsum.errors import DeadlineExceeded

SCRIPT = Path(__file__).with_name("gloo_ranks.py")
LOOPBACK = "0100007F"  # 127.0.0.1 as the kernel's table writes it


def results(exits: list[RankExit]) -> list:
    assert [(rank.exit_status, rank.stderr) for rank in exits] == [(0, "")] * len(exits)
    return [rank.result for rank in exits]


def test_bytes_arrive_unchanged(tmp_path):
    patterns = [[0x7F800001 + rank, -0x80000000 + rank, 1 + rank, -1 + rank] for rank in range(3)]
    gathered = {
        "calls": 6,
        "bytes_sent": 2 * (32 + 16 + 6 + 6 + 3 + 24),
        "bytes_received": 2 * (32 + 16 + 6 + 6 + 3 + 24),
    }
    for rank, found in enumerate(results(run_processes(3, SCRIPT, "move_bytes", tmp_path, 60.0))):
        assert found["equal"] == patterns
        assert found["unequal"] == [[patterns[0], patterns[0]], [], [patterns[2]]]
        assert found["dtypes"] == [[[1, 1, 1]] * 3] * 4
        assert found["empty"] == [3, 0, 5]
        assert found["broadcast"] == [1, 5]
        assert found["group_is_private"]
        assert set(found["listening"]) <= {LOOPBACK}
        broadcast = {"calls": 1, "bytes_sent": 32 * (rank == 1), "bytes_received": 16 * (rank != 1)}
        barrier = {"calls": 1, "bytes_sent": 0, "bytes_received": 0}
        assert found["stats"] == {"all_gather": gathered, "broadcast": broadcast, "barrier": barrier}


def test_a_wait_costs_no_cpu(tmp_path):
    waiter, _ = results(run_processes(2, SCRIPT, "arrive_late", tmp_path, 60.0, late_s=2.0))
    assert waiter["wall_s"] > 1.9
    assert waiter["cpu_s"] < 0.02


def test_a_dead_peer_is_an_error_that_names_the_call(tmp_path):
    survivor, victim = run_processes(2, SCRIPT, "lose_a_peer", tmp_path, 30.0)
    assert victim.exit_status == -signal.SIGKILL
    found = results([survivor])[0]
    (first_kind, first_text), (_, second_text) = found["errors"]
    assert first_kind == "LeafsumError"
    assert (
        "Gloo all_gather of 16 bytes a rank on rank 0 of 2 to move its bytes, but the connection failed" in first_text
    )
    assert "barrier on rank 0 of 2 was refused: an earlier all_gather of 16 bytes a rank failed" in second_text
    assert found["seconds"] < 15


def test_a_hanging_peer_is_a_deadline_that_names_the_call(tmp_path):
    arguments = {"folder": str(tmp_path), "timeout_s": 0.5}
    found = results(run_processes(2, SCRIPT, "wait_for_a_hanging_peer", tmp_path, 60.0, **arguments))[0]
    calls = ["all_gather of 16 bytes a rank", "broadcast of 16 bytes from rank 1", "barrier"]
    for (kind, text), call in zip(found["errors"], calls, strict=True):
        assert kind == "DeadlineExceeded"
        assert f"Gloo {call} on rank 0 of 2 to end within 0.5 s" in text
    assert 1.4 < found["seconds"] < 15


def test_a_rank_that_never_comes_is_a_named_deadline(tmp_path):
    start_s = time.monotonic()
    with pytest.raises(
        DeadlineExceeded, match=r"Gloo meeting of all ranks on rank 0 of 2 to end within 0\.5 s"
    ) as caught:
        GlooTransport(0, 2, tmp_path / "rendezvous", timeout_s=60.0, meeting_timeout_s=0.5)
    assert time.monotonic() - start_s < 15
    assert caught.value.timeout_s == 0.5


def test_a_closed_transport_refuses_calls(tmp_path):
    transport = GlooTransport(0, 1, tmp_path / "rendezvous", timeout_s=30.0)
    transport.barrier()
    transport.close()
    transport.close()
    with pytest.raises(Exception, match="Gloo barrier on rank 0 of 1 was refused: the transport was closed"):
        transport.barrier()


def test_a_store_in_no_folder_is_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"store_path in an existing folder, found .*missing/rendezvous"):
        GlooTransport(0, 1, tmp_path / "missing" / "rendezvous", timeout_s=30.0)
