"""What an arm's counts must show before it proves anything: ranks, exchanges, rows and requests as its name says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .arms import AUTO, Arm

if TYPE_CHECKING:
    from ..witness import RankWitness, Witness

SURELY_DELAYED_CALLS = 128
"""Collective calls of all ranks together of which one is delayed: that none is has a chance of (7/8)^128, 4e-8."""


def missing_witnesses(arm: Arm, witness: Witness, prompt_lengths: Sequence[int]) -> list[str]:
    """Why the arm's counts do not show what its name says; empty when they do."""
    longest = max(prompt_lengths)
    chunk = min(arm.prefill_chunk or longest, longest)
    found = []
    if witness.steps < 1:
        found.append("expected at least one step, found none")
    if witness.most_live_requests != arm.concurrency:
        found.append(f"expected {arm.concurrency} requests at once, found {witness.most_live_requests}")
    if witness.most_rows < chunk:
        found.append(f"expected a step of at least {chunk} rows, found at most {witness.most_rows}")
    if arm.concurrency == 1 and witness.most_rows > chunk:
        found.append(f"expected no step of more than {chunk} rows, found one of {witness.most_rows}")
    return found + _missing_ranks(arm, witness)


def _missing_ranks(arm: Arm, witness: Witness) -> list[str]:
    if len({rank.pid for rank in witness.ranks}) != arm.tp:
        pids = [rank.pid for rank in witness.ranks]
        return [f"expected {arm.tp} rank processes, found {len(pids)} with pids {pids}"]
    found = [text for rank in witness.ranks for text in _other_conditions(arm, rank)]
    if arm.tp == 1:
        return found
    found += [
        f"rank {rank.rank}: expected exchanges and bytes both ways, found {rank.exchanges} exchanges, "
        f"{rank.bytes_sent} bytes sent, {rank.bytes_received} received"
        for rank in witness.ranks
        if min(rank.exchanges, rank.bytes_sent, rank.bytes_received) < 1
    ]
    return found + list(_wrong_delays(arm, witness))


def _other_conditions(arm: Arm, rank: RankWitness) -> Iterator[str]:
    """What the rank did otherwise than the arm's name says; "auto" and 0 threads leave it to the rank."""
    where = f"rank {rank.rank}: expected"
    if arm.tp > 1 and arm.exchange not in (AUTO, rank.exchange_mode):
        yield f"{where} exchange {arm.exchange}, found {rank.exchange_mode}"
    if rank.transport_name != arm.transport:
        yield f"{where} transport {arm.transport}, found {rank.transport_name}"
    if arm.threads and rank.num_threads != arm.threads:
        yield f"{where} {arm.threads} threads, found {rank.num_threads}"
    if rank.poison != arm.adverse:
        expected, found = ("poison", "none") if arm.adverse else ("no poison", "some")
        yield f"{where} {expected}, found {found}"


def _wrong_delays(arm: Arm, witness: Witness) -> Iterator[str]:
    num_calls = sum(sum(rank.transport.values()) for rank in witness.ranks)
    num_delays = sum(rank.num_delays for rank in witness.ranks)
    if arm.adverse and num_delays == 0 and num_calls >= SURELY_DELAYED_CALLS:
        yield f"expected random delays, found none before {num_calls} collective calls of all ranks"
    if not arm.adverse and num_delays:
        yield f"expected no delays, found {num_delays}"
