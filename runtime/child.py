"""A child process that cannot outlive its parent unnoticed, and can always be ended.

A pool has one of its coordinator, a coordinator one of each rank. The child's life is tied to the parent by a death
pipe: the child holds the read end, and sees end-of-file when the parent is gone, however it went. The parent watches
the child through a pidfd, which a reused process id cannot fool.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

TERMINATE_TIMEOUT_S = 5.0
"""How long a child may take to leave after SIGTERM; then it is killed."""

KILL_TIMEOUT_S = 10.0
"""How long the kernel may take to remove a killed child (a process in uninterruptible sleep can take for ever)."""


class Child:
    """One child process, started by `python -m MODULE ARGUMENTS --death-fd N`, in a session of its own."""

    def __init__(self, role: str, module: str, arguments: Sequence[str], env: dict[str, str] | None = None) -> None:
        self.role = role
        read_fd, self._death_pipe_fd = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments, "--death-fd", str(read_fd)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(read_fd,),
                env=env,
                start_new_session=True,  # a terminal's Ctrl-C reaches the program alone, which then ends its children
            )
        except BaseException:
            os.close(self._death_pipe_fd)
            raise
        finally:
            os.close(read_fd)
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)

    def exit_status(self) -> int | None:
        """The exit code, negative for a signal, None while the child runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """The exit status, or None if the child still runs after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        select.select([self.pidfd], [], [], max(0.0, deadline_s - time.monotonic()))
        return self._process.poll()

    def tell_to_leave(self) -> None:
        """Close the death pipe: the child sees the same end-of-file as if its parent had died, and leaves at once."""
        if self._death_pipe_fd >= 0:
            os.close(self._death_pipe_fd)
            self._death_pipe_fd = -1

    def send_signal(self, signal_number: signal.Signals) -> None:
        if self.exit_status() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal_number)

    def forget(self) -> None:
        os.close(self.pidfd)
        self.pidfd = -1


def end_children(children: Sequence[Child], leave_timeout_s: float) -> None:
    """Told, then SIGTERM, then SIGKILL, for all children together:

    deadlines are shared, not added. Safe to call again.
    """
    alive = [child for child in children if child.pidfd >= 0]
    for child in alive:
        child.tell_to_leave()
    _wait_for_all(alive, leave_timeout_s)
    for signal_number, timeout_s in ((signal.SIGTERM, TERMINATE_TIMEOUT_S), (signal.SIGKILL, KILL_TIMEOUT_S)):
        for child in alive:
            child.send_signal(signal_number)
        _wait_for_all(alive, timeout_s)
    for child in alive:
        child.forget()


def _wait_for_all(children: Sequence[Child], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    for child in children:
        child.wait(max(0.0, deadline_s - time.monotonic()))


def describe_exit(exit_status: int | None) -> str:
    """`exit code 3`, `signal SIGKILL`, or `still running`."""
    if exit_status is None:
        return "still running"
    if exit_status >= 0:
        return f"exit code {exit_status}"
    try:
        return f"signal {signal.Signals(-exit_status).name}"
    except ValueError:
        return f"signal {-exit_status}"
