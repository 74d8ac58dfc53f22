"""A receipt: every arm serves the same prompts, and every hash of every prompt must be the first arm's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import ReceiptMismatch
from .progress import Counts, Display
from .receipt_arms import Arm, gangs_of
from .receipt_witness import ArmWitness, RunWitness, missing_witnesses, witness_of
from .sampling import Completion, SamplingParams
from .settings import Settings

Prompt = str | Sequence[int]
HASHES = ("token_sha256", "logits_sha256", "residual_hash")


class Pool(Protocol):
    """The part of WorkerPool that a receipt uses."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        on_progress: Callable[[Counts], None] | None = None,
    ) -> list[Completion]: ...
    def witness(self) -> RunWitness: ...
    def reconfigure(self, *, prefill_chunk: int, concurrency: int) -> None: ...


OpenPool = Callable[[Settings], AbstractContextManager[Pool]]


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm: its completions in prompt order, and what shows that it ran."""

    arm: Arm
    completions: tuple[Completion, ...]
    witness: ArmWitness

    @property
    def short_hash(self) -> str:
        """Twelve digits over all hashes of all prompts, for the table."""
        text = "".join(str(getattr(found, name)) for found in self.completions for name in HASHES)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Difference:
    """One prompt of one arm that is not the reference's."""

    arm: Arm
    prompt_index: int
    hashes: tuple[str, ...]
    token_index: int | None
    text: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "arm": self.arm.name,
            "prompt": self.prompt_index,
            "hashes": list(self.hashes),
            "first_differing_token": self.token_index,
            "text": self.text,
        }


def run_arms(
    arms: Sequence[Arm],
    base: Settings,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    open_pool: OpenPool,
    display: Display,
) -> Iterator[ArmResult]:
    """Serve all arms, one pool after the other; arms that a running pool can change share one."""
    num_done = 0
    for gang in gangs_of(arms):
        widest = max(gang, key=lambda arm: arm.concurrency)  # a pool's slots are as many as it was started with
        display.stage(f"starting {widest.tp} rank{'s' if widest.tp > 1 else ''}")
        with open_pool(widest.settings(base)) as pool:
            for arm in gang:
                num_done += 1
                display.stage(f"arm {num_done}/{len(arms)} {arm.name}")
                pool.reconfigure(prefill_chunk=arm.prefill_chunk, concurrency=arm.concurrency)
                before = pool.witness()
                completions = pool.generate(prompts, sampling, on_progress=display.on_progress)
                yield ArmResult(arm, tuple(completions), witness_of(before, pool.witness()))


def differences(results: Sequence[ArmResult]) -> list[Difference]:
    """Every prompt of every arm that differs from the first arm's, in order."""
    reference = results[0]
    found = []
    for result in results[1:]:
        for index, (mine, theirs) in enumerate(zip(reference.completions, result.completions, strict=True)):
            hashes = tuple(name for name in HASHES if getattr(mine, name) != getattr(theirs, name))
            if hashes:
                found.append(_difference(reference.arm, result.arm, index, hashes, mine, theirs))
    return found


def faults(results: Sequence[ArmResult]) -> list[str]:
    """Witnesses that are missing: an arm that did not do what its name says proves nothing."""
    return [
        f"{result.arm.name}: {fault}"
        for result in results
        for fault in missing_witnesses(
            result.arm, result.witness, [len(found.prompt_token_ids) for found in result.completions]
        )
        + _missing_digests(result)
    ]


def require_equal(found: Sequence[Difference], missing: Sequence[str]) -> None:
    """ReceiptMismatch with the first difference, or the first missing witness."""
    if found:
        raise ReceiptMismatch(f"{found[0].text} ({len(found)} prompts of all arms differ)")
    if missing:
        raise ReceiptMismatch(
            f"all hashes are equal, but the counts do not prove it: {missing[0]} ({len(missing)} faults)"
        )


def _missing_digests(result: ArmResult) -> list[str]:
    return [
        f"prompt {index + 1} has no logits_sha256: digests were not on"
        for index, found in enumerate(result.completions)
        if not found.logits_sha256
    ]


def _difference(
    reference: Arm, arm: Arm, index: int, hashes: tuple[str, ...], mine: Completion, theirs: Completion
) -> Difference:
    token_index = first_difference(mine.token_ids, theirs.token_ids)
    if token_index is not None:
        expected, got = _token(mine, token_index), _token(theirs, token_index)
        found = f"differs first at token {token_index}: expected {expected}, found {got}"
    else:
        found = f"has the same {len(mine.token_ids)} tokens, but {' and '.join(hashes)} differ"
    text = f"arm [{arm.name}], prompt {index + 1}: expected the bits of arm [{reference.name}]; the output {found}"
    return Difference(arm, index, hashes, token_index, text)


def first_difference(mine: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first token that differs, or where the shorter ends; None for equal sequences."""
    for index, (left, right) in enumerate(zip(mine, theirs, strict=False)):
        if left != right:
            return index
    return None if len(mine) == len(theirs) else min(len(mine), len(theirs))


def _token(completion: Completion, index: int) -> str:
    return f"id {completion.token_ids[index]}" if index < len(completion.token_ids) else "the end"
