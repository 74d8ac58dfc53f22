"""The run of a receipt: every arm serves the same prompts, and what came of it is kept with what shows that it ran."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..sampling import Completion, SamplingParams
from ..settings import Settings
from .arms import Arm, gangs_of

if TYPE_CHECKING:
    from ..witness import Progress, Witness

Prompt = str | Sequence[int]

HASHES = ("token_sha256", "logits_sha256", "residual_hash")
"""What of a completion must be equal in all arms."""


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm: its completions in prompt order, and the counts of this arm alone."""

    arm: Arm
    completions: tuple[Completion, ...]
    witness: Witness

    @property
    def short_hash(self) -> str:
        """Twelve digits over all hashes of all prompts, for the table."""
        text = "".join(str(getattr(found, name)) for found in self.completions for name in HASHES)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def run_arms(
    arms: Sequence[Arm],
    base: Settings,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    tell_stage: Callable[[str], None],
    on_progress: Callable[[Progress], None] | None,
) -> Iterator[ArmResult]:
    """Serve all arms, one pool after the other; arms that a running pool can change share one."""
    from ..pool import WorkerPool  # here: the command line knows this module, and --help needs no sockets

    num_done = 0
    for gang in gangs_of(arms):
        widest = max(gang, key=lambda arm: arm.concurrency)  # a pool's slots are as many as it was started with
        tell_stage(f"starting {widest.tp} rank{'s' if widest.tp > 1 else ''}")
        with WorkerPool(widest.settings(base)) as pool:
            for arm in gang:
                num_done += 1
                tell_stage(f"arm {num_done}/{len(arms)} {arm.name}")
                pool.reconfigure(prefill_chunk=arm.prefill_chunk, concurrency=arm.concurrency)
                before = pool.witness()
                completions = pool.generate(prompts, sampling, on_progress=on_progress)
                yield ArmResult(arm, tuple(completions), pool.witness().since(before))
