"""A process that is watched, and a child process that cannot outlive its parent unnoticed and can always be ended.

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
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..ranks.machine import stat_fields

log = logging.getLogger("leafsum.child")

TERMINATE_TIMEOUT_S = 5.0
"""How long a child may take to leave after SIGTERM; then it is killed."""

KILL_TIMEOUT_S = 10.0
"""How long the kernel may take to remove a killed child (one in uninterruptible sleep can take for ever)."""

_open_death_pipes: set[int] = set()


class Process:
    """A process that is watched through a pidfd. `role` names it in errors and in the log.

    By itself, one that somebody else has started: nobody but its parent learns how it ended, and only a signal tells it
    to leave.
    """

    def __init__(self, role: str, pid: int) -> None:
        """Raises ProcessLookupError where there is no such process."""
        self.role = role
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)

    def tell_to_leave(self) -> None:
        """Ask for a quiet end. Never blocks."""
        self.send_signal(signal.SIGTERM)

    def exit_status(self) -> int | None:
        """The exit code, negative for a signal, None while the process runs."""
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> int | None:
        """The exit status, or None if the process still runs after `timeout_s`. From any thread."""
        if self.pidfd >= 0:
            exits = select.poll()  # select.select would refuse a descriptor of 1024 or above
            exits.register(self.pidfd, select.POLLIN)
            if not exits.poll(max(0.0, timeout_s) * 1000):
                return None
        return self._exit_status()

    def send_signal(self, signal_number: signal.Signals) -> None:
        if self.exit_status() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal_number)

    def state(self) -> str:
        """What the kernel says of the process: "sleeping", STOPPED, "running", ...

        Of its threads, the one that tells most: a rank computes on others than its first.
        """
        letters = set()
        for stat in Path(f"/proc/{self.pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):  # a thread that has just ended
                letters.add(stat_fields(stat)[0])
        return next((state for letter, state in STATES.items() if letter in letters), "gone")

    def forget(self) -> None:
        """Close the pidfd; of a process that still runs, the log tells."""
        if self.exit_status() is None:
            log.error("%s (pid %d) survives SIGKILL; it is %s", self.role, self.pid, self.state())
        os.close(self.pidfd)
        self.pidfd = -1

    def _exit_status(self) -> int | None:
        return EXIT_UNKNOWN


class Child(Process):
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
        read_fd, write_fd = os.pipe()
        _open_death_pipes.add(write_fd)
        self._tell = weakref.finalize(self, _close_death_pipe, write_fd)
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
            self._last_status: int | None = None
            super().__init__(role, self._process.pid)
        except BaseException:
            self.tell_to_leave()
            raise
        finally:
            os.close(read_fd)

    def tell_to_leave(self) -> None:
        """Close the death pipe: the child sees what it would see if its parent had died, and leaves at once."""
        self._tell()

    def forget(self) -> None:
        self._last_status = self.exit_status()
        if self._last_status is not None:
            self._process.wait()  # takes it from the kernel's table; until then any thread may ask for its status
        super().forget()

    def _exit_status(self) -> int | None:
        if self.pidfd < 0:
            return self._last_status
        try:
            ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # a program that ignores SIGCHLD, or waits for any child, has taken it
            return EXIT_UNKNOWN
        assert ended is not None, "its pidfd said that it has ended"
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


EXIT_UNKNOWN = 1 << 16
"""Exit status of a process that ended and is no child of this one, or was waited for by somebody else."""

LIMITS_HINT = "Look at the limits of processes and open files (ulimit -u, ulimit -n), and at free memory"
"""What to do where a process cannot be started."""

STOPPED = "stopped by a signal"

STATES = {
    "T": STOPPED,
    "t": "stopped by a debugger",
    "R": "running",
    "D": "in uninterruptible sleep",
    "S": "sleeping",
    "Z": "dead",
}
"""proc(5), /proc/PID/task/TID/stat, field 3; what tells most of a process comes first."""


def end_processes(processes: Iterable[Process], leave_timeout_s: float) -> None:
    """Told, then SIGTERM, then SIGKILL, for all processes together: deadlines are shared. Safe to call again.

    One that is stopped can obey nothing but SIGKILL, and gets it at once.
    """
    alive = [process for process in processes if process.pidfd >= 0]
    for process in alive:
        process.tell_to_leave()
        if process.state() == STOPPED:
            process.send_signal(signal.SIGKILL)
    _wait_for_all(alive, leave_timeout_s)
    for signal_number, timeout_s in ((signal.SIGTERM, TERMINATE_TIMEOUT_S), (signal.SIGKILL, KILL_TIMEOUT_S)):
        for process in alive:
            process.send_signal(signal_number)
        _wait_for_all(alive, timeout_s)
    for process in alive:
        process.forget()


def describe_exit(exit_status: int | None) -> str:
    """`exit code 3`, `signal SIGKILL`, or `still running`."""
    if exit_status is None:
        return "still running"
    if exit_status == EXIT_UNKNOWN:
        return "how it ended is not known here"
    if exit_status >= 0:
        return f"exit code {exit_status}"
    try:
        return f"signal {signal.Signals(-exit_status).name}"
    except ValueError:
        return f"signal {-exit_status}"


def _wait_for_all(processes: Iterable[Process], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    for process in processes:
        process.wait(deadline_s - time.monotonic())


def _close_death_pipe(write_fd: int) -> None:
    if write_fd in _open_death_pipes:
        _open_death_pipes.remove(write_fd)
        os.close(write_fd)


def _close_inherited_pipes() -> None:
    """In a forked copy of the program: its life must not stand in for the program's."""
    for write_fd in list(_open_death_pipes):
        _close_death_pipe(write_fd)


os.register_at_fork(after_in_child=_close_inherited_pipes)
