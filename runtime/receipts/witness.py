"""What an arm's counts must show before it proves anything: ranks, exchanges, rows and requests as its name says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .arms import Arm

if TYPE_CHECKING:
    from ..witness import Witness


def missing_witnesses(arm: Arm, witness: Witness, prompt_lengths: Sequence[int]) -> list[str]:
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


def _missing_ranks(arm: Arm, witness: Witness) -> list[str]:
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
