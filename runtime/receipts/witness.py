"""What shows that an arm really ran: exchanges and bytes of every rank, most rows and most requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .receipt_arms import Arm


class RunRankWitness(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def exchanges(self) -> int: ...
    @property
    def bytes_sent(self) -> int: ...
    @property
    def bytes_received(self) -> int: ...


class RunWitness(Protocol):
    """A pool's counters since it started; the most_* since it was last configured (runtime.pool.Witness)."""

    @property
    def steps(self) -> int: ...
    @property
    def most_rows(self) -> int: ...
    @property
    def most_live_requests(self) -> int: ...
    @property
    def ranks(self) -> Sequence[RunRankWitness]: ...


@dataclass(frozen=True, slots=True)
class RankCounts:
    """One rank's share of one arm."""

    rank: int
    pid: int
    exchanges: int
    bytes_sent: int
    bytes_received: int


@dataclass(frozen=True, slots=True)
class ArmWitness:
    """One arm's counts: the difference of a pool's counters before and after it."""

    steps: int
    most_rows: int
    most_live_requests: int
    ranks: tuple[RankCounts, ...]

    def to_dict(self) -> dict[str, Any]:
        ranks = [{name: getattr(rank, name) for name in RankCounts.__slots__} for rank in self.ranks]
        return {
            "steps": self.steps,
            "most_rows": self.most_rows,
            "most_live_requests": self.most_live_requests,
            "ranks": ranks,
        }


def witness_of(before: RunWitness, after: RunWitness) -> ArmWitness:
    ranks = tuple(
        RankCounts(
            rank=now.rank,
            pid=now.pid,
            exchanges=now.exchanges - then.exchanges,
            bytes_sent=now.bytes_sent - then.bytes_sent,
            bytes_received=now.bytes_received - then.bytes_received,
        )
        for then, now in zip(before.ranks, after.ranks, strict=True)
    )
    return ArmWitness(after.steps - before.steps, after.most_rows, after.most_live_requests, ranks)


def missing_witnesses(arm: Arm, witness: ArmWitness, prompt_lengths: Sequence[int]) -> list[str]:
    """Why the arm's counts do not show what its name says; empty when they do."""
    longest = max(prompt_lengths)
    chunk = min(arm.prefill_chunk or longest, longest)
    live = min(arm.concurrency, len(prompt_lengths))
    found = []
    if witness.steps < 1:
        found.append("expected at least one step, found none")
    if witness.most_live_requests != live:
        found.append(f"expected {live} requests at once, found {witness.most_live_requests}")
    if witness.most_rows < chunk:
        found.append(f"expected a step of at least {chunk} rows, found at most {witness.most_rows}")
    if arm.concurrency == 1 and witness.most_rows > chunk:
        found.append(f"expected no step of more than {chunk} rows, found one of {witness.most_rows}")
    return found + _missing_ranks(arm, witness)


def _missing_ranks(arm: Arm, witness: ArmWitness) -> list[str]:
    if len({rank.pid for rank in witness.ranks}) != arm.tp:
        pids = [rank.pid for rank in witness.ranks]
        return [f"expected {arm.tp} rank processes, found {len(pids)} with pids {pids}"]
    if arm.tp == 1:
        return []
    return [
        f"rank {rank.rank}: expected exchanges and bytes both ways, found {rank.exchanges} exchanges, "
        f"{rank.bytes_sent} bytes sent, {rank.bytes_received} received"
        for rank in witness.ranks
        if min(rank.exchanges, rank.bytes_sent, rank.bytes_received) < 1
    ]
