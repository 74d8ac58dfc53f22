"""What a transport is: it moves bytes between ranks and never adds anything."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Protocol

import torch

_PADDING_BYTE = 0xFF  # a NaN in every float format: a padding row that is read by mistake shows at once


@dataclass(slots=True)
class CollectiveCount:
    """One kind of collective on one rank. Bytes are payload, padding rows included, headers not."""

    calls: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass(slots=True)
class TransportStats:
    """What one rank has moved.

    An all-gather sends this rank's part to every other rank, so it counts part * (num_ranks - 1) bytes sent and as many
    received. A broadcast counts payload * (num_ranks - 1) sent on the root and one payload received elsewhere.
    `wait_ns` is the time spent in calls: moving bytes, and waiting for other ranks. `num_delays` counts the sleeps that
    a DelayedTransport has put before calls. `exchange_ns` is the time in whole exchanges, their calls included:
    choosing rows, placing what came, and adding it.
    """

    all_gather: CollectiveCount = field(default_factory=CollectiveCount)
    broadcast: CollectiveCount = field(default_factory=CollectiveCount)
    barrier: CollectiveCount = field(default_factory=CollectiveCount)
    wait_ns: int = 0
    exchange_ns: int = 0
    num_delays: int = 0

    @property
    def bytes_sent(self) -> int:
        return self.all_gather.bytes_sent + self.broadcast.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self.all_gather.bytes_received + self.broadcast.bytes_received

    @property
    def calls(self) -> dict[str, int]:
        """How many, by kind."""
        return {
            "all_gather": self.all_gather.calls,
            "broadcast": self.broadcast.calls,
            "barrier": self.barrier.calls,
        }

    def as_dict(self) -> dict[str, dict[str, int]]:
        """{"all_gather": {"calls": n, "bytes_sent": n, "bytes_received": n}, "broadcast": ..., "barrier": ...}"""
        return {kind: asdict(getattr(self, kind)) for kind in ("all_gather", "broadcast", "barrier")}

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the part of a call that other ranks take part in."""
        begin_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self.wait_ns += time.perf_counter_ns() - begin_ns

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Around all that is done only because there are other ranks."""
        begin_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self.exchange_ns += time.perf_counter_ns() - begin_ns

    def count_all_gather(self, part: torch.Tensor, num_ranks: int) -> None:
        num_bytes = part.nbytes * (num_ranks - 1)
        self.all_gather.calls += 1
        self.all_gather.bytes_sent += num_bytes
        self.all_gather.bytes_received += num_bytes

    def count_broadcast(self, payload: torch.Tensor, num_ranks: int, is_root: bool) -> None:
        self.broadcast.calls += 1
        if is_root:
            self.broadcast.bytes_sent += payload.nbytes * (num_ranks - 1)
        else:
            self.broadcast.bytes_received += payload.nbytes


class Transport(Protocol):
    """The collectives of one rank. Every rank makes the same calls in the same order; a call returns with its result.

    Every wait has a deadline. A failed call raises LeafsumError (DeadlineExceeded where time ran out), which names the
    rank and the operation; the transport is then of no further use and refuses every later call.
    """

    rank: int
    num_ranks: int
    stats: TransportStats

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """part [...], one shape and dtype on all ranks -> [num_ranks, ...] by rank. Empty parts do not travel."""
        ...

    def all_gather_unequal(self, part: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """part [counts[rank], ...] -> one [counts[r], ...] for each rank r. Every rank knows all counts.

        Parts travel padded to the largest count; the padding (bytes 0xFF) is not in the result.
        """
        return gather_padded(self, part, counts)

    def broadcast(self, payload: torch.Tensor, root: int) -> torch.Tensor:
        """The root's payload, on every rank; elsewhere `payload` gives only the shape and dtype."""
        ...

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        ...

    def close(self) -> None:
        """Gives back sockets and threads; never waits for another rank."""
        ...


def gather_padded(transport: Transport, part: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """all_gather_unequal by way of all_gather."""
    if len(counts) != transport.num_ranks or part.shape[0] != counts[transport.rank]:
        raise ValueError(
            f"expected counts of {transport.num_ranks} ranks and a part of counts[{transport.rank}] rows on rank "
            f"{transport.rank}, found counts {list(counts)} and a part of shape {list(part.shape)}"
        )
    num_rows = max(counts)
    gathered = transport.all_gather(_pad_rows(part, num_rows))
    if min(counts) == num_rows:
        return gathered.unbind()
    return tuple(gathered[rank, :count] for rank, count in enumerate(counts))


def _pad_rows(part: torch.Tensor, num_rows: int) -> torch.Tensor:
    if part.shape[0] == num_rows:
        return part
    padded = part.new_empty((num_rows, *part.shape[1:]))
    padded[: part.shape[0]] = part
    as_bytes(padded[part.shape[0] :]).fill_(_PADDING_BYTE)
    return padded


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as uint8 [nbytes], no copy: every transport moves any dtype, bit for bit."""
    if math.prod(tensor.shape) == 0:
        return torch.empty(0, dtype=torch.uint8)
    return tensor.view(-1).view(torch.uint8)


class SingleRank(Transport):
    """The transport of a gang of one: nothing travels."""

    def __init__(self) -> None:
        self.rank = 0
        self.num_ranks = 1
        self.stats = TransportStats()

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        return part.unsqueeze(0)

    def broadcast(self, payload: torch.Tensor, root: int) -> torch.Tensor:
        if root != 0:
            raise ValueError(f"expected root 0 in a gang of one rank, found {root}")
        return payload

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass
