"""A child process that cannot outlive its parent unnoticed, and can always be ended.

A pool has one of its coordinator, a coordinator one of each rank. The child's life is tied to the parent by a death
pipe: the child holds the read end, and sees end-of-file when the parent is gone, however it went. The parent watches
the child through a pidfd, which a reused process id cannot fool.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger("leafsum.child")

TERMINATE_TIMEOUT_S = 5.0
"""How long a child may take to leave after SIGTERM; then it is killed."""

KILL_TIMEOUT_S = 10.0
"""How long the kernel may take to remove a killed child (one in uninterruptible sleep can take for ever)."""

_open_death_pipes: set[int] = set()


class Child:
    """One child process, started by `python -m MODULE ARGUMENTS --death-fd N`, in a session of its own.

    With `grandparent_death_fd`, a death pipe that this process itself watches, `--death-fd N,M`: the end of either is
    the child's end.

    A child whose object is dropped is told to leave: the death pipe closes with it.
    """

    def __init__(
        self,
        role: str,
        module: str,
        arguments: Sequence[str],
        env: dict[str, str] | None = None,
        grandparent_death_fd: int | None = None,
    ) -> None:
        self.role = role
        read_fd, write_fd = os.pipe()
        _open_death_pipes.add(write_fd)
        self.tell_to_leave = weakref.finalize(self, _close_death_pipe, write_fd)
        """Close the death pipe: the child sees what it would see if its parent had died, and leaves at once."""
        death_fds = [fd for fd in (read_fd, grandparent_death_fd) if fd is not None]
        try:
            self._process = subprocess.Popen(
                # -P: the working folder stays off sys.path, a module that lies there is none of ours
                [sys.executable, "-P", "-m", module, *arguments, "--death-fd", ",".join(map(str, death_fds))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=death_fds,
                env=env,
                start_new_session=True,  # a terminal's Ctrl-C reaches the program alone, which then ends its children
            )
            self.pid = self._process.pid
            self.pidfd = os.pidfd_open(self.pid)
        except BaseException:
            self.tell_to_leave()
            raise
        finally:
            os.close(read_fd)

    def exit_status(self) -> int | None:
        """The exit code, negative for a signal, None while the child runs."""
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> int | None:
        """The exit status, or None if the child still runs after `timeout_s`. From any thread."""
        if self.pidfd >= 0:
            exits = select.poll()  # select.select would refuse a descriptor of 1024 or above
            exits.register(self.pidfd, select.POLLIN)
            if exits.poll(max(0.0, timeout_s) * 1000):
                return self._process.wait()  # at once; Popen.poll says None while another thread asks
        return self._process.returncode

    def send_signal(self, signal_number: signal.Signals) -> None:
        if self.exit_status() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal_number)

    def state(self) -> str:
        """What the kernel says of the process: "sleeping", "stopped", "running", ..."""
        try:
            letter = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "gone"
        return STATES.get(letter, letter)

    def forget(self) -> None:
        if self.exit_status() is None:
            log.error("%s (pid %d) survives SIGKILL; it is %s", self.role, self.pid, self.state())
        os.close(self.pidfd)
        self.pidfd = -1


STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead",
}
"""proc(5), /proc/PID/stat, field 3."""


def end_children(children: Sequence[Child], leave_timeout_s: float) -> None:
    """Told, then SIGTERM, then SIGKILL, for all children together: deadlines are shared. Safe to call again."""
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


def _wait_for_all(children: Sequence[Child], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    for child in children:
        child.wait(deadline_s - time.monotonic())


def _close_death_pipe(write_fd: int) -> None:
    if write_fd in _open_death_pipes:
        _open_death_pipes.remove(write_fd)
        os.close(write_fd)


def _close_inherited_pipes() -> None:
    """In a forked copy of the program: its life must not stand in for the program's."""
    for write_fd in list(_open_death_pipes):
        _close_death_pipe(write_fd)


os.register_at_fork(after_in_child=_close_inherited_pipes)
