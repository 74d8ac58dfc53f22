"""Faults on order: a test writes which process shall do what in which phase, and the process does it, once.

An order is a file in the folder that the variable FAULTS names: its name says victim and phase, its text the fault. It
goes when the fault happens, so that a new gang is whole, and a test can tell that the fault did happen.
"""

from __future__ import annotations

import collections
import errno
import itertools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

import zmq
from leafsum.ranks.messages import MAX_MESSAGE_BYTES, Plan

VARIABLE = "FAULTS"
TESTS = Path(__file__).resolve().parent
SMALL_DISK_BYTES = 1 << 20
"""A folder in a file system of at most this size may be filled up."""


def order_path(folder: Path, victim: str, phase: str) -> Path:
    return folder / f"{victim} {phase}"


def order(folder: Path, victim: str, phase: str, fault: str) -> None:
    order_path(folder, victim, phase).write_text(fault)


def has_happened(folder: Path, victim: str, phase: str) -> bool:
    return not order_path(folder, victim, phase).exists()


def search_path() -> str:
    """PYTHONPATH of a process that is to find the modules of this folder."""
    return os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])


# In the victim


class Victim:
    """This process, as orders name it. `control` is its socket, `control_name` the file name of
    its path.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = Path(os.environ[VARIABLE])
        self.control: zmq.Socket[bytes] | None = None
        self.control_name = ""

    def take(self, phase: str, faults: Collection[str]) -> str:
        """The fault that is ordered for this phase, if it is one of `faults`; "" otherwise."""
        path = order_path(self.folder, self.name, phase)
        try:
            fault = path.read_text()
        except FileNotFoundError:
            return ""
        if fault not in faults:
            return ""
        path.unlink()
        return fault

    def meet(self, phase: str, *, at_socket: bool, anywhere: bool) -> None:
        """Do what is ordered for this phase. `at_socket`: the thread that calls may touch the control socket."""
        deeds = {**(self.socket_deeds() if at_socket else {}), **(DEEDS if anywhere else {})}
        if fault := self.take(phase, deeds):
            deeds[fault]()

    def socket_deeds(self) -> dict[str, Callable[[], Any]]:
        return {
            "closed socket": self.close_connection,
            "corrupt message": lambda: self.say(b"\xc1 is no message"),
            "oversized message": lambda: self.say(bytes(MAX_MESSAGE_BYTES + 1)),
        }

    def say(self, frame: bytes) -> None:
        assert self.control is not None, "no phase with a socket"
        self.control.send(frame)

    def close_connection(self) -> None:
        """Shut the control socket's connection down, below ZeroMQ, which keeps its descriptor. It may just be made."""
        while not (found := [each for each in unix_connections() if self.control_name in each.names]):
            time.sleep(0.01)
        for connection in found:
            connection.socket.shutdown(socket.SHUT_RDWR)


class Connection:
    def __init__(self, fd: int) -> None:
        self.socket = socket.socket(fileno=os.dup(fd))
        self.names = {Path(name).name for name in (self.socket.getsockname(), self.socket.getpeername()) if name}


def unix_connections() -> list[Connection]:
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                found.append(Connection(fd))
        except (OSError, TypeError):  # gone meanwhile, not connected, or of another family
            continue
    return found


def raise_error() -> NoReturn:
    raise ValueError("a fault on purpose")


def hang() -> NoReturn:
    """Asleep for ever; other threads go on."""
    while True:
        time.sleep(1 << 20)


def hold_the_interpreter() -> None:
    """Runs for ever, as a kernel does that never returns and keeps the interpreter's lock: no thread goes on."""
    collections.deque(itertools.repeat(0), maxlen=0)


DEEDS: dict[str, Callable[[], Any]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exception": raise_error,
    "deadline": hang,
    "deadline with the GIL": hold_the_interpreter,
}


PRETENDED = "pretended"
"""Value of the variable DISK where no small disk could be made."""


def fill_disk(folder: Path) -> None:
    """Leave not a byte and not an inode in the file system of `folder`, which was made for this."""
    if os.environ.get("DISK") == PRETENDED:
        os.posix_fallocate = refuse_space  # type: ignore[assignment]
        zmq.Socket.bind = refuse_space  # type: ignore[assignment, method-assign]
        return
    state = os.statvfs(folder)
    size = state.f_blocks * state.f_frsize
    assert size <= SMALL_DISK_BYTES, f"expected a small disk of the test's own at {folder}, found {size:,} bytes"
    for number in itertools.count():
        try:
            (folder / f"filler-{number}").write_bytes(bytes(4096))
        except OSError as error:
            if error.errno == errno.ENOSPC:
                return
            raise


def refuse_space(first: object, *_: Any) -> NoReturn:
    if isinstance(first, zmq.Socket):
        raise zmq.ZMQError(errno.ENOSPC)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


DECODE_POSITION = 9
"""Rows from here on are drawn ones: a fault of the phase decode comes when some tokens are out."""


def phase_of(plan: Plan) -> str:
    """ "prompt", "decode", or "" for a step of neither, as when rows are drawn again."""
    if any(len(run.token_ids) > 1 for run in plan.runs):
        return "prompt"
    is_decode = all(not run.token_ids and run.start >= DECODE_POSITION for run in plan.runs)
    return "decode" if is_decode else ""


def option(name: str) -> str:
    """The value of one of this process's own arguments."""
    return sys.argv[sys.argv.index(name) + 1]
