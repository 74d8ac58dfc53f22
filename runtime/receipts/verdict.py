"""What came out of a receipt's arms: requests that failed, bits that differ, and why it may prove nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...errors import ReceiptMismatch
from ..sampling import Completion
from .arms import Arm
from .controls import ControlOutcome
from .hazards import HazardReport
from .locate import Place, first_difference, first_place
from .run import HASHES, ArmResult
from .witness import missing_witnesses

NO_POWER = "power: no control was run"


@dataclass(frozen=True, slots=True)
class Difference:
    """One prompt, numbered from 1, of one arm that is not the reference's. `place`: where its residual parts first."""

    arm: Arm
    prompt: int
    hashes: tuple[str, ...]
    token_index: int | None
    place: Place | None
    text: str


@dataclass(frozen=True, slots=True)
class Fault:
    """Why an arm, or without one the whole receipt, proves nothing."""

    arm: Arm | None
    text: str

    def __str__(self) -> str:
        return f"arm [{self.arm.name}], {self.text}" if self.arm else self.text


@dataclass(frozen=True, slots=True)
class Power:
    """What shows that the prompts could have told a difference.

    `not_run`: controls that were not run and why; `hazards_must_occur`: a missing one is a fault.
    """

    controls: tuple[ControlOutcome, ...] = ()
    not_run: tuple[str, ...] = ()
    hazards: HazardReport = field(default_factory=HazardReport)
    hazards_must_occur: bool = False

    def faults(self) -> list[Fault]:
        texts = [outcome.fault for outcome in self.controls if outcome.fault]
        return [Fault(None, text) for text in texts + (self.hazards.faults() if self.hazards_must_occur else [])]

    def not_shown(self) -> list[str]:
        return ([] if self.controls else [NO_POWER]) + self.hazards.not_shown()

    @property
    def summary(self) -> str:
        num_good = sum(not outcome.fault for outcome in self.controls)
        controls = [f"{num_good} of {len(self.controls)} controls did as they must"] if self.controls else []
        return ", ".join(controls + [f"not shown: {text}" for text in self.not_shown()])


@dataclass(frozen=True, slots=True)
class Verdict:
    """`failures`: requests that failed alone; `faults`: an arm or a control that did not do what its name says."""

    failures: tuple[Fault, ...]
    differences: tuple[Difference, ...]
    faults: tuple[Fault, ...]

    @classmethod
    def of(cls, reference: ArmResult, others: Sequence[ArmResult], power: Power | None = None) -> Verdict:
        """All `others` are compared with `reference`; one without a witness ran elsewhere, and is not judged."""
        here = [result for result in (reference, *others) if result.witness]
        return cls(
            tuple(fault for result in here for fault in _failures(result)),
            tuple(difference for result in others for difference in _differences(reference, result)),
            (*(fault for result in here for fault in _faults(result)), *(power.faults() if power else ())),
        )

    @property
    def equal(self) -> bool:
        return not (self.failures or self.differences or self.faults)

    @property
    def summary(self) -> str:
        if self.equal:
            return "all equal"
        return f"{len(self.failures)} failed requests, {len(self.differences)} differences, {len(self.faults)} faults"

    def is_equal(self, arm: Arm) -> bool:
        """Whether the arm's hashes are the reference's."""
        return self.word_of(arm) not in ("FAILED", "DIFFERS")

    def word_of(self, arm: Arm) -> str:
        """The arm's verdict in a word, for the table."""
        if any(fault.arm == arm for fault in self.failures):
            return "FAILED"
        if any(difference.arm == arm for difference in self.differences):
            return "DIFFERS"
        return "NO WITNESS" if any(fault.arm == arm for fault in self.faults) else "equal"

    def require_equal(self) -> None:
        """ReceiptMismatch with the first failure, else the first difference, else the first fault."""
        if self.failures:
            raise ReceiptMismatch(f"{self.failures[0]} ({len(self.failures)} requests of all arms failed)")
        if self.differences:
            raise ReceiptMismatch(f"{self.differences[0].text} ({len(self.differences)} prompts of all arms differ)")
        if self.faults:
            raise ReceiptMismatch(
                f"all hashes are equal, but that proves nothing: {self.faults[0]} ({len(self.faults)} faults)"
            )


def _failures(result: ArmResult) -> list[Fault]:
    return [
        Fault(result.arm, f"prompt {number} failed: {found.error}")
        for number, found in enumerate(result.completions, start=1)
        if found.error
    ]


def _faults(result: ArmResult) -> list[Fault]:
    assert result.witness is not None, "only arms that ran here are judged"
    lengths = [len(found.prompt_token_ids) for found in result.completions]
    texts = missing_witnesses(result.arm, result.witness, lengths)
    for number, found in enumerate(result.completions, start=1):
        if not found.error:
            missing = [name for name in ("logits_sha256", "layer_hashes") if not getattr(found, name)]
            texts += [f"prompt {number} has no {name}: digests were not on" for name in missing]
    return [Fault(result.arm, text) for text in texts]


def _differences(reference: ArmResult, result: ArmResult) -> list[Difference]:
    """Every prompt that differs from the reference's, in order; one that failed is no difference."""
    found = []
    for number, (mine, theirs) in enumerate(zip(reference.completions, result.completions, strict=True), start=1):
        hashes = tuple(name for name in HASHES if getattr(mine, name) != getattr(theirs, name))
        if hashes and not mine.error and not theirs.error:
            found.append(_difference(reference.arm, result.arm, number, hashes, mine, theirs))
    return found


def _difference(
    reference: Arm, arm: Arm, number: int, hashes: tuple[str, ...], mine: Completion, theirs: Completion
) -> Difference:
    token_index = first_difference(mine.token_ids, theirs.token_ids)
    if token_index is not None:
        expected, got = _token(mine, token_index), _token(theirs, token_index)
        found = f"differs first at token {token_index}: expected {expected}, found {got}"
    else:
        found = f"has the same {len(mine.token_ids)} tokens, but {' and '.join(hashes)} differ"
    place = first_place(mine, theirs)
    where = f"the residual differs first at {place}" if place else "no layer's residual differs"
    text = (
        f"arm [{arm.name}], prompt {number}: expected the bits of arm [{reference.name}]; the output {found}; {where}"
    )
    return Difference(arm, number, hashes, token_index, place, text)


def _token(completion: Completion, index: int) -> str:
    return f"id {completion.token_ids[index]}" if index < len(completion.token_ids) else "the end"
