"""What transports between processes share: how calls are counted, refused, and named when they fail."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, TypeVar, TypeVarTuple

import torch

from ..errors import DeadlineExceeded, TransportError
from .transport import Transport, TransportStats

Ts = TypeVarTuple("Ts")
R = TypeVar("R")


class ProcessTransport(Transport):
    """One rank's end of a mesh of processes.

    A kind of mesh moves bytes in `_all_gather`, `_broadcast` and `_barrier`. There it raises TimeoutError where time
    ran out and ConnectionError where a peer is lost; the text of either goes on after "but".
    """

    kind: ClassVar[str]

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        store_path: str | Path,
        timeout_s: float,
        meeting_timeout_s: float | None,
    ) -> None:
        if type(rank) is not int or not 0 <= rank < num_ranks:
            raise ValueError(f"expected a rank of 0..{num_ranks - 1}, found {rank!r}")
        timeouts_s = {"timeout_s": timeout_s, "meeting_timeout_s": meeting_timeout_s}
        for name, value in timeouts_s.items():
            if value is not None and not 0 < value < math.inf:  # nan, too: a wait to that deadline would spin
                raise ValueError(f"expected a finite {name} above 0, found {value!r}")
        if not Path(store_path).parent.is_dir():  # torch's store would try to open it for five minutes
            raise ValueError(f"expected store_path in an existing folder, found {store_path}")
        self.rank = rank
        self.num_ranks = num_ranks
        self.stats = TransportStats()
        self._timeout_s = timeout_s
        self._meeting_timeout_s = timeout_s if meeting_timeout_s is None else meeting_timeout_s
        self._refusal = ""  # why no further call is possible

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        part = part.contiguous()
        gathered = part.new_empty((self.num_ranks, *part.shape))
        if part.nbytes == 0:
            return gathered
        self._call(f"all_gather of {part.nbytes} bytes a rank", self._all_gather, gathered, part)
        self.stats.count_all_gather(part, self.num_ranks)
        return gathered

    def broadcast(self, payload: torch.Tensor, root: int) -> torch.Tensor:
        if not 0 <= root < self.num_ranks:
            raise ValueError(f"expected a root of 0..{self.num_ranks - 1}, found {root}")
        received = payload.clone(memory_format=torch.contiguous_format)
        if payload.nbytes == 0:
            return received
        self._call(f"broadcast of {payload.nbytes} bytes from rank {root}", self._broadcast, received, root)
        self.stats.count_broadcast(payload, self.num_ranks, is_root=self.rank == root)
        return received

    def barrier(self) -> None:
        self._call("barrier", self._barrier)
        self.stats.barrier.calls += 1

    def close(self) -> None:
        self._refusal = self._refusal or "the transport was closed"

    @abstractmethod
    def _all_gather(self, gathered: torch.Tensor, part: torch.Tensor) -> None:
        """part [...] into gathered [num_ranks, ...]; both are contiguous and not empty."""

    @abstractmethod
    def _broadcast(self, payload: torch.Tensor, root: int) -> None:
        """The root's payload into the others'; it is contiguous and not empty."""

    @abstractmethod
    def _barrier(self) -> None: ...

    def _give_up(self, operation: str) -> None:
        """After a failure: no further call."""
        self._refusal = self._refusal or f"an earlier {operation} failed"

    def _call(self, operation: str, move: Callable[[*Ts], None], *arguments: *Ts) -> None:
        """move(*arguments), counted as a wait; refused on a mesh that is closed or torn."""
        if self._refusal:
            raise TransportError(f"{self._where(operation)} was refused: {self._refusal}; start the ranks again")
        begin_ns = time.perf_counter_ns()
        try:
            self._named(operation, self._timeout_s, move, *arguments)
        finally:
            self.stats.wait_ns += time.perf_counter_ns() - begin_ns

    def _named(self, operation: str, timeout_s: float, move: Callable[[*Ts], R], *arguments: *Ts) -> R:
        """move(*arguments), its failures named; after one, no further call. No context manager: that takes 2 us."""
        try:
            return move(*arguments)
        except BaseException as error:
            self._give_up(operation)
            where = self._where(operation)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    f"expected {where} to end within {timeout_s:g} s, but {error}; look for a rank that hangs or is "
                    "slow, or raise the timeout",
                    what=where,
                    timeout_s=timeout_s,
                ) from error
            if isinstance(error, ConnectionError):
                raise TransportError(f"expected {where} to move its bytes, but {error}") from error
            raise

    def _where(self, operation: str) -> str:
        return f"{self.kind} {operation} on rank {self.rank} of {self.num_ranks}"
