"""What came out of a receipt's arms: requests that failed, bits that differ, and counts that prove nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import ReceiptMismatch
from ..sampling import Completion
from .arms import Arm
from .run import HASHES, ArmResult
from .witness import missing_witnesses


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


@dataclass(frozen=True, slots=True)
class Fault:
    """Why one arm proves nothing."""

    arm: Arm
    text: str

    def __str__(self) -> str:
        return f"arm [{self.arm.name}], {self.text}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`failures`: requests that failed alone; `faults`: an arm that did not do what its name says."""

    failures: tuple[Fault, ...]
    differences: tuple[Difference, ...]
    faults: tuple[Fault, ...]

    @classmethod
    def of(cls, results: Sequence[ArmResult]) -> Verdict:
        return cls(
            tuple(fault for result in results for fault in _failures(result)),
            tuple(difference for result in results[1:] for difference in _differences(results[0], result)),
            tuple(fault for result in results for fault in _faults(result)),
        )

    @property
    def equal(self) -> bool:
        return not (self.failures or self.differences or self.faults)

    @property
    def summary(self) -> str:
        if self.equal:
            return "all equal"
        return (
            f"{len(self.failures)} failed requests, {len(self.differences)} differences, "
            f"{len(self.faults)} missing witnesses"
        )

    def word_of(self, arm: Arm) -> str:
        """The arm's verdict in a word, for the table."""
        if any(fault.arm == arm for fault in self.failures):
            return "FAILED"
        if any(difference.arm == arm for difference in self.differences):
            return "DIFFERS"
        return "NO WITNESS" if any(fault.arm == arm for fault in self.faults) else "equal"

    def require_equal(self) -> None:
        """ReceiptMismatch with the first failure, else the first difference, else the first missing witness."""
        if self.failures:
            raise ReceiptMismatch(f"{self.failures[0]} ({len(self.failures)} requests of all arms failed)")
        if self.differences:
            raise ReceiptMismatch(f"{self.differences[0].text} ({len(self.differences)} prompts of all arms differ)")
        if self.faults:
            raise ReceiptMismatch(
                f"all hashes are equal, but the counts do not prove it: {self.faults[0]} ({len(self.faults)} faults)"
            )


def _failures(result: ArmResult) -> list[Fault]:
    return [
        Fault(result.arm, f"prompt {index} failed: {found.error}")
        for index, found in enumerate(result.completions, start=1)
        if found.error
    ]


def _faults(result: ArmResult) -> list[Fault]:
    lengths = [len(found.prompt_token_ids) for found in result.completions]
    texts = missing_witnesses(result.arm, result.witness, lengths)
    texts += [
        f"prompt {index} has no logits_sha256: digests were not on"
        for index, found in enumerate(result.completions, start=1)
        if not found.logits_sha256 and not found.error
    ]
    return [Fault(result.arm, text) for text in texts]


def _differences(reference: ArmResult, result: ArmResult) -> list[Difference]:
    """Every prompt that differs from the reference's, in order; one that failed is no difference."""
    found = []
    for index, (mine, theirs) in enumerate(zip(reference.completions, result.completions, strict=True)):
        hashes = tuple(name for name in HASHES if getattr(mine, name) != getattr(theirs, name))
        if hashes and not mine.error and not theirs.error:
            found.append(_difference(reference.arm, result.arm, index, hashes, mine, theirs))
    return found


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
