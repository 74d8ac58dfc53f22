"""A child is told, then terminated, then killed; and its own parent's death reaches it."""

import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from leafsum.runtime import child as child_module
from leafsum.runtime.child import EXIT_UNKNOWN, STOPPED, Child, describe_exit, end_processes
from processes import wait_until

TESTS = Path(__file__).resolve().parent.parent
ENV = {**os.environ, "PYTHONPATH": str(TESTS)}


@pytest.fixture(autouse=True)
def short_deadlines(monkeypatch):
    monkeypatch.setattr(child_module, "TERMINATE_TIMEOUT_S", 0.5)


@pytest.fixture
def children(capfd):
    """Starts children and waits until each is up (they say so on stderr, which they inherit)."""
    started = []

    def start(*manners: str) -> list[Child]:
        started.extend(Child(manner, "stand_in", [manner], env=ENV) for manner in manners)
        heard = []

        def all_are_up() -> bool:
            heard.append(capfd.readouterr().err)
            return "".join(heard).count("up") == len(manners)

        wait_until(all_are_up, "all children are up")
        return started

    yield start
    end_processes(started, 0.0)


@pytest.mark.parametrize(
    ("manner", "leave_timeout_s", "exit_status"),
    [("polite", 20.0, 0), ("stubborn", 0.2, -signal.SIGTERM), ("deaf", 0.2, -signal.SIGKILL)],
)
def test_a_child_is_told_then_terminated_then_killed(children, manner, leave_timeout_s, exit_status):
    (one,) = children(manner)
    assert one.exit_status() is None
    end_processes([one], leave_timeout_s)
    assert one.exit_status() == exit_status
    end_processes([one], leave_timeout_s)  # again: nothing to do, nothing raised


def test_children_share_one_escalation(children):
    both = children("polite", "deaf")
    end_processes(both, 0.2)
    assert [one.exit_status() for one in both] == [0, -signal.SIGKILL]


def test_the_exit_of_a_child_is_seen_through_its_pidfd():
    one = Child("fails", "stand_in", ["fails"], env=ENV)
    assert one.wait(30.0) == 3
    end_processes([one], 0.0)


def test_a_process_is_running_when_one_of_its_threads_is_and_stopped_when_all_are(children):
    """A rank computes in a thread beside its first, which sleeps."""
    (one,) = children("busy")
    wait_until(lambda: one.state() == "running", "running")
    one.send_signal(signal.SIGSTOP)
    wait_until(lambda: one.state() == STOPPED, "stopped")
    begin_s = time.monotonic()
    end_processes([one], 120.0)
    assert time.monotonic() - begin_s < 60.0, "it waited for one that can obey nothing"
    assert one.state() == "gone"
    assert one.exit_status() == -signal.SIGKILL


def test_a_parent_that_is_killed_takes_its_child_along():
    program = """
        import os, signal
        from leafsum.runtime.child import Child
        child = Child("polite", "stand_in", ["polite"])
        print(child.pid, flush=True)
        signal.pause()
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, env=ENV)
    assert parent.stdout is not None
    with parent.stdout:
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    ready, _, _ = select.select([pidfd], [], [], 30.0)
    os.close(pidfd)
    assert ready, "the child outlived its parent by 30 s"


@pytest.mark.parametrize(
    ("exit_status", "text"), [(None, "still running"), (3, "exit code 3"), (-9, "signal SIGKILL"), (-250, "signal 250")]
)
def test_an_exit_is_named(exit_status, text):
    assert describe_exit(exit_status) == text


def test_an_exit_code_that_somebody_else_has_taken_is_not_known():
    """As where a program ignores SIGCHLD, or waits for any child."""
    one = Child("fails", "stand_in", ["fails"], env=ENV)
    os.waitpid(one.pid, 0)
    assert one.wait(60.0) == EXIT_UNKNOWN
    assert describe_exit(EXIT_UNKNOWN) == "how it ended is not known here"
    end_processes([one], 0.0)
    assert one.exit_status() == EXIT_UNKNOWN


def test_any_thread_may_ask_how_a_child_has_ended():
    one = Child("fails", "stand_in", ["fails"], env=ENV)
    found = []
    threads = [threading.Thread(target=lambda: found.append(one.wait(60.0))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [3] * 8
    end_processes([one], 0.0)
    assert one.exit_status() == 3
