"""Runs are found by the titles of their processes, whoever started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from leafsum.runtime.live_runs import LiveRun, live_runs
from processes import state_of, wait_until

RUN = f"5e{os.getpid():010x}"
"""An id that no other test process has."""

PROGRAM = """
import setproctitle, subprocess, sys, time
if sys.argv[1] == "program":
    subprocess.run([sys.executable, sys.argv[0], "coordinator"])
else:
    ranks = ("rank 0/2", "rank 1/2") if sys.argv[1] == "coordinator" else ()
    children = [subprocess.Popen([sys.executable, sys.argv[0], rank]) for rank in ranks]
    setproctitle.setproctitle(f"leafsum: {sys.argv[1]} RUN")
    time.sleep(600)
""".replace("RUN", RUN)


@pytest.fixture
def program(tmp_path) -> Iterator[subprocess.Popen]:
    """Stand-ins for a program, its coordinator and two ranks."""
    script = tmp_path / "stand_ins.py"
    script.write_text(PROGRAM)
    process = subprocess.Popen([sys.executable, str(script), "program"], start_new_session=True)
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def own_run() -> LiveRun | None:
    return next((run for run in live_runs() if run.run_id == RUN), None)


def whole_run() -> LiveRun | None:
    run = own_run()
    return run if run is not None and not run.missing else None


def test_processes_are_grouped_by_their_run(program):
    begin_s = time.monotonic()
    wait_until(whole_run, "all stand-ins have their titles")
    run = whole_run()
    assert run is not None
    assert (run.program_pid, run.tp) == (program.pid, 2)
    assert [process.role for process in run.processes] == ["coordinator", "rank 0", "rank 1"]
    assert len({process.pid for process in run.processes}) == 3
    assert all(process.memory_bytes > 1 << 20 for process in run.processes)
    assert all(0 <= process.age_s <= time.monotonic() - begin_s + 5 for process in run.processes)
    assert all(0 <= process.cpu_s <= process.age_s + 1 for process in run.processes)
    assert not run.is_striking


@pytest.mark.usefixtures("program")
def test_a_stopped_rank_and_a_dead_one_stand_out():
    wait_until(whole_run, "all stand-ins have their titles")
    run = whole_run()
    assert run is not None
    first, second = run.ranks
    os.kill(first.pid, signal.SIGSTOP)
    wait_until(lambda: state_of(first.pid) == "T", "it is stopped")
    stopped = own_run()
    assert stopped is not None
    assert stopped.is_striking
    assert stopped.ranks[0].state == "T"
    os.kill(second.pid, signal.SIGKILL)
    wait_until(lambda: state_of(second.pid) == "Z", "it is dead, and nobody waits for it")
    halved = own_run()
    assert halved is not None
    assert halved.missing == ("rank 1",)


@pytest.mark.usefixtures("program")
def test_ranks_without_a_coordinator_are_a_run_still():
    wait_until(whole_run, "all stand-ins have their titles")
    run = whole_run()
    assert run is not None
    assert run.coordinator is not None
    os.kill(run.coordinator.pid, signal.SIGKILL)
    wait_until(lambda: (found := own_run()) and found.coordinator is None, "it is gone")
    orphaned = own_run()
    assert orphaned is not None
    assert (orphaned.program_pid, orphaned.missing, len(orphaned.ranks)) == (0, ("coordinator",), 2)
