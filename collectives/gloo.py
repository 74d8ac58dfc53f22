"""Gloo over loopback: the portable transport between CPU ranks. Gloo only moves bytes here, it never adds."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed

from .process_transport import ProcessTransport
from .transport import as_bytes

_LOOPBACK = "127.0.0.1"
_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30
_SLACK_NS = 10**9
_dist: Any = torch.distributed  # Any: its stubs leave out the stores, and the options and collectives of Gloo


class GlooTransport(ProcessTransport):
    """One rank's end of a Gloo mesh.

    The ranks meet through a file, so no port has to be agreed on: `store_path` must name a file that does not exist yet
    in an existing folder, the same for all ranks, used once; the constructor returns when all ranks have come. The
    sockets are bound to loopback. `meeting_timeout_s` (None: timeout_s) is the deadline of that meeting, `timeout_s` of
    every later call. The process group is private to this object: torch.distributed's global group is neither made nor
    needed. Between calls and in waits a rank costs 0.2 ms of CPU a second (_lazy_timers says why).
    """

    kind: ClassVar[str] = "Gloo"

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        store_path: str | Path,
        timeout_s: float,
        meeting_timeout_s: float | None = None,
    ) -> None:
        super().__init__(rank, num_ranks, store_path, timeout_s, meeting_timeout_s)
        self._group: Any = None
        limit_s = self._meeting_timeout_s
        self._group = self._named("meeting of all ranks", limit_s, self._meet, store_path, limit_s)

    def close(self) -> None:
        super().close()
        self._group = None  # the only reference: its sockets and threads go with it

    def _meet(self, store_path: str | Path, timeout_s: float) -> Any:
        with _failures_named():
            return _make_group(self.rank, self.num_ranks, str(store_path), timedelta(seconds=timeout_s))

    def _all_gather(self, gathered: torch.Tensor, part: torch.Tensor) -> None:
        options = self._timed(_dist.distributed_c10d.AllgatherOptions())
        outputs = list(as_bytes(gathered).view(self.num_ranks, -1).unbind())
        with _failures_named():
            self._group.allgather([outputs], [as_bytes(part)], options).wait()

    def _broadcast(self, payload: torch.Tensor, root: int) -> None:
        options = self._timed(_dist.distributed_c10d.BroadcastOptions())
        options.rootRank = root
        with _failures_named():
            self._group.broadcast([as_bytes(payload)], options).wait()

    def _barrier(self) -> None:
        with _failures_named():
            self._group.barrier(self._timed(_dist.distributed_c10d.BarrierOptions())).wait()

    def _timed(self, options: Any) -> Any:
        options.timeout = timedelta(seconds=self._timeout_s)
        return options


@contextmanager
def _failures_named() -> Iterator[None]:
    """Gloo's one kind of error as the two that a ProcessTransport tells apart."""
    try:
        yield
    except RuntimeError as error:
        if any(sign in str(error).lower() for sign in ("timed out", "timeout")):
            raise TimeoutError(f"not every rank took part: {error}") from error
        raise ConnectionError(
            f"the connection failed: {error}; a peer has most likely ended, look for its error first"
        ) from error


def _make_group(rank: int, num_ranks: int, store_path: str, timeout: timedelta) -> Any:
    store = _dist.FileStore(store_path, num_ranks)
    store.set_timeout(timeout)
    options = _dist.ProcessGroupGloo._Options()
    with _lazy_timers():  # around the device alone: meeting through the store has timed waits that must stay short
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    options._timeout = timeout  # of connecting; every call brings its own
    options._threads = 1  # calls of one rank follow one another
    return _dist.ProcessGroupGloo(store, rank, num_ranks, options)


@contextmanager
def _lazy_timers() -> Iterator[None]:
    """Threads made inside let the kernel put timed wake-ups off by up to a second; whatever arrives wakes at once.

    Gloo's thread waits in epoll for 10 ms at a time, for ever: 2.5 to 5 ms of CPU a second in an idle rank, 0.2 ms so
    (torch 2.13). A thread inherits the timer slack of the one that makes it: prctl(2), PR_SET_TIMERSLACK.
    """
    libc = ctypes.CDLL(None)
    own_slack_ns = libc.prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0)
    libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NS), 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(own_slack_ns), 0, 0, 0)
