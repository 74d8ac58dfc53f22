"""Controls of a receipt: runs that are wrong on purpose, and what they show of the prompts.

A prompt that a wrong sum does not change could not have told a wrong sum from the right one, so its equal hashes prove
nothing. One mantissa bit flipped on one rank must end the run: ranks compare what they have at every step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...errors import RankMismatch
from ...ranks.numerics import CONTROLS
from .arms import NO_CONTROL, Arm
from .run import ArmResult, ControlRun

PICK_ORDER = "pick-order"
FLIPPED_BIT = "flipped-bit"

FEWEST_PICKS = 3
"""Two rows that start from +0.0 add to the same sum in either order."""

NAMED_PLACE = re.compile(r"position \d+, layer \d+")
"""How a RankMismatch says where ranks parted."""


@dataclass(frozen=True, slots=True)
class ControlPlan:
    """The controls to run, one gang each, and why others are not run."""

    arms: tuple[Arm, ...]
    not_run: tuple[str, ...]

    @classmethod
    def of(cls, arms: Sequence[Arm], top_k: int) -> ControlPlan:
        """All controls that say something of these arms and of a model that picks `top_k` experts a token."""
        planned = []
        not_run = []
        for control in CONTROLS:
            if control == NO_CONTROL:
                continue
            reason = _why_not(control, arms, top_k)
            if reason:
                not_run.append(f"control {control}: {reason}")
            else:
                planned.append(_arm_of(control, arms))
        return cls(tuple(planned), tuple(not_run))

    @classmethod
    def left_out(cls) -> ControlPlan:
        return cls((), ("controls: left out by --no-controls",))


def _why_not(control: str, arms: Sequence[Arm], top_k: int) -> str:
    if control == PICK_ORDER:
        few = f"this model picks {top_k} experts a token, and so few rows add to the same sum in either order"
        return few if top_k < FEWEST_PICKS else ""
    return "" if any(arm.tp > 1 for arm in arms) else "it needs more than one rank, and no arm has"


def _arm_of(control: str, arms: Sequence[Arm]) -> Arm:
    """The reference's settings at the fewest ranks above one; its placement and transport are the first of their lists.

    Exchange slots: the controls replace what is done with single rows.
    """
    reference = arms[0]
    several = min((arm for arm in arms if arm.tp > 1), key=lambda arm: arm.tp, default=None)
    if several is None:
        return replace(reference, control=control)
    return replace(
        reference,
        tp=several.tp,
        exchange="slots",
        placement=several.placement,
        transport=several.transport,
        control=control,
    )


@dataclass(frozen=True, slots=True)
class ControlOutcome:
    """What one control showed. Prompts are numbered from 1; `fault` is empty where it did what it must."""

    arm: Arm
    differ: tuple[int, ...]
    same: tuple[int, ...]
    ended: str
    fault: str

    @classmethod
    def of(cls, reference: ArmResult, run: ControlRun) -> ControlOutcome:
        differ: list[int] = []
        same: list[int] = []
        for number, (expected, found) in enumerate(zip(reference.completions, run.completions, strict=False), start=1):
            (same if found.residual_hash == expected.residual_hash else differ).append(number)
        ended = f"{type(run.error).__name__}: {run.error}" if run.error else ""
        if run.arm.control == FLIPPED_BIT:
            fault = _fault_of_flipped_bit(run, ended)
        else:
            fault = next(_faults(run, same, ended), "")
        return cls(run.arm, tuple(differ), tuple(same), ended, fault)

    @property
    def line(self) -> str:
        """What came of it, for the screen."""
        num_prompts = len(self.differ) + len(self.same)
        found = f"ended with {self.ended}" if self.ended else f"{len(self.differ)} of {num_prompts} prompts differ"
        return f"{'FAULT' if self.fault else 'as it must'}: control {self.arm.control} [{self.arm.name}]: {found}"


def _fault_of_flipped_bit(run: ControlRun, ended: str) -> str:
    expected = f"control {FLIPPED_BIT}: expected the run to end with a RankMismatch that names rank, step, position "
    if run.error is None:
        return f"{expected}and layer, it ran to its end: ranks do not notice that they differ"
    is_named = isinstance(run.error, RankMismatch) and run.error.step >= 0 and NAMED_PLACE.search(str(run.error))
    return "" if is_named else f"{expected}and layer, it ended with {ended}"


def _faults(run: ControlRun, same: Sequence[int], ended: str) -> Iterator[str]:
    control = run.arm.control
    if ended:
        yield f"control {control}: expected other residuals, the run ended with {ended}"
    for number, found in enumerate(run.completions, start=1):
        if found.error:
            yield f"control {control}: expected another residual, prompt {number} failed: {found.error}"
    if same:
        numbers = ", ".join(map(str, same))
        prompts, do, them = ("prompt", "does", "it") if len(same) == 1 else ("prompts", "do", "them")
        yield (
            f"{prompts} {numbers} {do} not tell {control} from the canonical order: this receipt proves nothing about "
            f"{them}; use longer prompts or more tokens"
        )
