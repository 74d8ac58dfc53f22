"""Gloo over loopback: the transport between CPU ranks of one host. Gloo only moves bytes here, it never adds."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from ..errors import DeadlineExceeded, TransportError
from .transport import Transport, TransportStats, as_bytes

_LOOPBACK = "127.0.0.1"
_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30
_SLACK_NS = 10**9
_dist: Any = torch.distributed  # Any: its stubs leave out the stores, and the options and collectives of Gloo


class GlooTransport(Transport):
    """One rank's end of a Gloo mesh.

    The ranks meet through a file, so no port has to be agreed on: `store_path` must name a file that does not exist yet
    in an existing folder, the same for all ranks, used once; the constructor returns when all ranks have come. The
    sockets are bound to loopback. `meeting_timeout_s` (None: timeout_s) is the deadline of that meeting, `timeout_s` of
    every later call. The process group is private to this object: torch.distributed's global group is neither made nor
    needed. Between calls and in waits a rank costs 0.2 ms of CPU a second (_lazy_timers says why).
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        store_path: str | Path,
        timeout_s: float,
        meeting_timeout_s: float | None = None,
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.stats = TransportStats()
        self._timeout_s = timeout_s
        self._refusal = ""  # why no further call is possible
        self._group: Any = None
        if not Path(store_path).parent.is_dir():  # torch's store would try to open it for five minutes
            raise ValueError(f"expected store_path in an existing folder, found {store_path}")
        meeting_timeout_s = timeout_s if meeting_timeout_s is None else meeting_timeout_s
        with self._failures_named("meeting of all ranks", meeting_timeout_s):
            self._group = _make_group(rank, num_ranks, str(store_path), timedelta(seconds=meeting_timeout_s))

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        part = part.contiguous()
        gathered = part.new_empty((self.num_ranks, *part.shape))
        if part.nbytes == 0:
            return gathered
        outputs = list(as_bytes(gathered).view(self.num_ranks, -1).unbind())
        with self._calling(f"all_gather of {part.nbytes} bytes a rank") as group:
            group.allgather([outputs], [as_bytes(part)], self._timed(_dist.distributed_c10d.AllgatherOptions())).wait()
        self.stats.count_all_gather(part, self.num_ranks)
        return gathered

    def broadcast(self, payload: torch.Tensor, root: int) -> torch.Tensor:
        received = payload.clone(memory_format=torch.contiguous_format)
        if payload.nbytes == 0:
            return received
        with self._calling(f"broadcast of {payload.nbytes} bytes from rank {root}") as group:
            options = self._timed(_dist.distributed_c10d.BroadcastOptions())
            options.rootRank = root
            group.broadcast([as_bytes(received)], options).wait()
        self.stats.count_broadcast(payload, self.num_ranks, is_root=self.rank == root)
        return received

    def barrier(self) -> None:
        with self._calling("barrier") as group:
            group.barrier(self._timed(_dist.distributed_c10d.BarrierOptions())).wait()
        self.stats.barrier.calls += 1

    def close(self) -> None:
        self._refusal = self._refusal or "the transport was closed"
        self._group = None  # the only reference: its sockets and threads go with it

    @contextmanager
    def _calling(self, operation: str) -> Iterator[Any]:
        """One call: refused on a mesh that is closed or torn, else made with its failures named."""
        if self._group is None or self._refusal:
            raise TransportError(f"{self._where(operation)} was refused: {self._refusal}; start the ranks again")
        with self._failures_named(operation, self._timeout_s):
            yield self._group

    @contextmanager
    def _failures_named(self, operation: str, timeout_s: float) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._refusal = f"an earlier {operation} failed"
            where = self._where(operation)
            if _ran_out_of_time(error):
                raise DeadlineExceeded(
                    f"expected {where} to end within {timeout_s:g} s, but not every rank took part: {error}; "
                    "look for a rank that hangs or is slow, or raise the timeout",
                    what=where,
                    timeout_s=timeout_s,
                ) from error
            raise TransportError(
                f"expected {where} to move its bytes, but the connection failed: {error}; "
                "a peer has most likely ended, look for its error first"
            ) from error

    def _timed(self, options: Any) -> Any:
        options.timeout = timedelta(seconds=self._timeout_s)
        return options

    def _where(self, operation: str) -> str:
        return f"Gloo {operation} on rank {self.rank} of {self.num_ranks}"


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


def _ran_out_of_time(error: RuntimeError) -> bool:
    text = str(error).lower()
    return any(sign in text for sign in ("timed out", "timeout"))
