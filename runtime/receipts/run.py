"""The run of a receipt: every arm serves the same prompts, and what came of it is kept with what shows that it ran."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import LeafsumError
from ..sampling import Completion, SamplingParams
from ..settings import Settings
from .arms import Arm, gangs_of

if TYPE_CHECKING:
    from ..pool import WorkerPool
    from ..witness import Progress, Witness

Prompt = str | Sequence[int]

HASHES = ("token_sha256", "logits_sha256", "residual_hash", "layer_hashes")
"""What of a completion must be equal in all arms."""


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm: its completions in prompt order, and the counts of it alone (None for an arm that ran elsewhere)."""

    arm: Arm
    completions: tuple[Completion, ...]
    witness: Witness | None

    @property
    def hashes_sha256(self) -> str:
        """SHA-256 over all hashes of all prompts: two arms are equal exactly when theirs are."""
        rows = [
            [found.token_sha256, found.logits_sha256, found.residual_hash, layers_sha256(found)]
            for found in self.completions
        ]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def layers_sha256(found: Completion) -> str:
    """Of the hashes of all rows and layers; those of a failed request, which end anywhere, do not count."""
    return hashlib.sha256(b"" if found.error else found.layer_hashes).hexdigest()


@dataclass(frozen=True, slots=True)
class ControlRun:
    """A run that must not be equal: its completions in prompt order, or the error that ended it."""

    arm: Arm
    completions: tuple[Completion, ...] = ()
    error: LeafsumError | None = None


@dataclass(frozen=True, slots=True)
class Runner:
    """What all arms have in common. `tell_stage` hears what begins, `on_progress` how far an arm is."""

    base: Settings
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    tell_stage: Callable[[str], None]
    on_progress: Callable[[Progress], None] | None

    def run_arms(self, arms: Sequence[Arm]) -> Iterator[ArmResult]:
        """Serve all arms, one pool after the other; arms that a running pool can change share one."""
        from ..pool import WorkerPool  # here: the command line knows this module, and --help needs no sockets

        num_done = 0
        for gang in gangs_of(arms):
            widest = max(gang, key=lambda arm: arm.concurrency)  # a pool's slots are as many as it was started with
            self.tell_stage(f"starting {widest.tp} rank{'s' if widest.tp > 1 else ''}")
            with WorkerPool(widest.settings(self.base)) as pool:
                for arm in gang:
                    num_done += 1
                    self.tell_stage(f"arm {num_done}/{len(arms)} {arm.name}")
                    yield self._serve(pool, arm)

    def run_control(self, arm: Arm) -> ControlRun:
        """Every error that leafsum raises on purpose is an outcome here: some control must end in one."""
        self.tell_stage(f"control {arm.control}")
        try:
            (result,) = self.run_arms([arm])
        except LeafsumError as error:
            return ControlRun(arm, error=error)
        return ControlRun(arm, result.completions)

    def _serve(self, pool: WorkerPool, arm: Arm) -> ArmResult:
        pool.reconfigure(prefill_chunk=arm.prefill_chunk, concurrency=arm.concurrency)
        before = pool.witness()
        order = submission_order(arm, len(self.prompts))
        served = pool.generate([self.prompts[index] for index in order], self.sampling, on_progress=self.on_progress)
        by_index = dict(zip(order, served, strict=True))
        completions = tuple(by_index[index] for index in range(len(order)))
        return ArmResult(arm, completions, pool.witness().since(before))


def submission_order(arm: Arm, num_prompts: int) -> list[int]:
    """The prompts' indices in the order in which the arm submits them."""
    order = list(range(num_prompts))
    if arm.adverse:
        random.Random(arm.order_seed).shuffle(order)
    return order
