"""The control plane's sockets and the wake-ups of one process: what a pool, a coordinator and a rank share.

Sockets are ZeroMQ over ipc in a private 0700 folder; one process owns one end and one thread touches it.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
from pathlib import Path

import zmq

from ..errors import ConfigError
from .machine import stat_fields
from .messages import MAX_MESSAGE_BYTES

IPC_PATH_LIMIT_BYTES = 107
"""The kernel's limit for a socket's path (sun_path, less the closing zero)."""

LINGER_MS = 1000
"""How long a closing socket may still deliver its last words."""

RECONNECT_MS = 10
"""How often the connecting side tries while the binding side starts."""

LAST_WORDS_MS = 200
"""A death can be seen before the last message of the dead: how long to look for one."""

END_TIMEOUT_S = 1.0
"""A dying peer's connection may break before its end is seen: how long to look for it."""

AWAY_S = 1.0
"""A wait that ends this much later than asked for: this process was stopped itself, and nobody else was late."""

PR_SET_PDEATHSIG = 1


def open_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, path: Path, *, bind: bool, identity: bytes = b""
) -> zmq.Socket[bytes]:
    """A DEALER or ROUTER at `path`. A ROUTER refuses to drop what it cannot route."""
    if len(os.fsencode(path)) > IPC_PATH_LIMIT_BYTES:
        raise ConfigError(
            f"the control socket's path has {len(os.fsencode(path))} bytes, the kernel takes {IPC_PATH_LIMIT_BYTES}: "
            f"{path}. Set TMPDIR to a shorter folder"
        )
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    # Unbounded queues: a send never blocks or drops. What is under way bounds them: one plan, and the open requests.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    if identity:
        socket.setsockopt(zmq.IDENTITY, identity)
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if bind:
        try:
            socket.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(
                f"cannot make the control socket {path}: {zmq.strerror(error.errno or 0)}. Look for free space and "
                "inodes there, or set TMPDIR to another folder"
            ) from error
    else:
        socket.connect(f"ipc://{path}")
    return socket


def poll(poller: zmq.Poller, timeout_s: float | None) -> set[object]:
    """The sockets and file descriptors that are ready; empty when `timeout_s` (None: no limit) ran out."""
    timeout_ms = None if timeout_s is None else math.ceil(max(0.0, timeout_s) * 1000)
    return {source for source, _ in poller.poll(timeout_ms)}


def rank_identity(run_id: str, rank: int) -> bytes:
    """The routing identity of a rank's socket: only a process that was told the run id has it."""
    return f"{run_id}:{rank}".encode()


def end_if_stopped(pid: int) -> None:
    """SIGKILL for a process that a signal has stopped: it cannot see that it shall end."""
    try:
        if stat_fields(Path(f"/proc/{pid}/stat"))[0] == "T":
            os.kill(pid, signal.SIGKILL)
    except OSError:
        return  # it has ended


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the thread that started this process ends; exit if it has already.

    Only for children started from their parent's main thread: the signal follows the thread.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)
