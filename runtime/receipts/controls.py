"""Controls of a receipt: runs that are wrong on purpose, and what they show of the prompts.

A prompt that a wrong sum does not change could not have told a wrong sum from the right one, so its equal hashes prove
nothing. One mantissa bit flipped on one rank must end the run: ranks compare what they have at every step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...collectives.control_names import CONTROLS, FLIPPED_BIT, FLIPPED_SUM, PARTIAL_SUMS, PICK_ORDER, SPOILED_ROWS
from ...errors import RankMismatch
from .arms import Arm
from .run import ArmResult, ControlRun

FEWEST_PICKS = 3
"""Two rows that start from +0.0 add to the same sum in either order."""

NAMED_PLACE = re.compile(r"RankMismatch: .* at step \d+, .*position \d+, layer (\d+): rank \d+ .*; rank (\d+) ")
"""How a RankMismatch says where ranks parted, and which of them from rank 0."""

LEFT_OUT = "controls: left out by --no-controls"


@dataclass(frozen=True, slots=True)
class ControlPlan:
    """The controls to run, one gang each, and why others are not run."""

    arms: tuple[Arm, ...]
    not_run: tuple[str, ...]

    @classmethod
    def of(cls, arms: Sequence[Arm], top_k: int) -> ControlPlan:
        """All controls that say something of these arms, and of a model that picks `top_k` experts a token.

        `top_k` is 0 for a model without experts.
        """
        planned = []
        not_run = []
        for control in CONTROLS:
            reason = _why_not(control, arms, top_k)
            if reason:
                not_run.append(f"{not_run_prefix(control)}{reason}")
            else:
                planned += _arms_of(control, arms)
        return cls(tuple(planned), tuple(not_run))

    @classmethod
    def left_out(cls) -> ControlPlan:
        return cls((), (LEFT_OUT,))


def not_run_prefix(control: str) -> str:
    """How the reason begins why a control was not run."""
    return f"control {control}: "


def _why_not(control: str, arms: Sequence[Arm], top_k: int) -> str:
    if top_k == 0 and control not in PARTIAL_SUMS:
        return "this model has no experts"
    if control == PICK_ORDER:
        few = f"this model picks {top_k} experts a token, and so few rows add to the same sum in either order"
        return few if top_k < FEWEST_PICKS else ""
    return "" if any(arm.tp > 1 for arm in arms) else "it needs more than one rank, and no arm has"


def _arms_of(control: str, arms: Sequence[Arm]) -> list[Arm]:
    """The reference's settings at the fewest ranks above one; its placement and transport are the first of their lists.

    What an exchange gathered is spoiled for every exchange of the list. Another order needs none: its rows travel as
    slots.
    """
    reference = arms[0]
    several = min((arm for arm in arms if arm.tp > 1), key=lambda arm: arm.tp, default=None)
    if several is None:
        return [replace(reference, adverse=False, control=control)]
    exchanges = dict.fromkeys(arm.exchange for arm in arms if arm.tp > 1) if control in SPOILED_ROWS else ("slots",)
    return [
        replace(
            reference,
            tp=several.tp,
            exchange=exchange,
            placement=several.placement,
            transport=several.transport,
            adverse=False,
            control=control,
        )
        for exchange in exchanges
    ]


def flipped_layer(expert_layers: Sequence[int]) -> int:
    """The layer in which FLIPPED_BIT flips, -1 for a model without experts.

    A model with a single layer of experts comes to it in its second step.
    """
    return ([-1, *expert_layers])[min(FLIPPED_SUM, len(expert_layers))]


@dataclass(frozen=True, slots=True)
class ControlOutcome:
    """What one control showed. Prompts are numbered from 1; `fault` is empty where it did what it must."""

    arm: Arm
    differ: tuple[int, ...]
    same: tuple[int, ...]
    ended: str
    fault: str

    @classmethod
    def of(cls, reference: ArmResult, run: ControlRun, layer: int) -> ControlOutcome:
        """`layer`: the one in which FLIPPED_BIT flips."""
        differ: list[int] = []
        same: list[int] = []
        for number, (expected, found) in enumerate(zip(reference.completions, run.completions, strict=False), start=1):
            (same if found.residual_hash == expected.residual_hash else differ).append(number)
        ended = f"{type(run.error).__name__}: {run.error}" if run.error else ""
        if run.arm.control == FLIPPED_BIT:
            fault = _fault_of_flipped_bit(run, ended, layer)
        else:
            fault = next(_faults(run, same, ended), "")
        return cls(run.arm, tuple(differ), tuple(same), ended, fault)

    @property
    def line(self) -> str:
        """What came of it, for the screen."""
        num_prompts = len(self.differ) + len(self.same)
        found = f"ended with {self.ended}" if self.ended else f"{len(self.differ)} of {num_prompts} prompts differ"
        return f"{'FAULT' if self.fault else 'as it must'}: control {self.arm.control} [{self.arm.name}]: {found}"


def _fault_of_flipped_bit(run: ControlRun, ended: str, layer: int) -> str:
    last = run.arm.tp - 1
    expected = (
        f"control {FLIPPED_BIT}: expected the run to end with a RankMismatch that names step, position, layer {layer} "
        f"and rank {last}, where the bit was flipped"
    )
    if run.error is None:
        return f"{expected}; it ran to its end: ranks do not notice that they differ"
    place = NAMED_PLACE.match(ended)
    is_right = isinstance(run.error, RankMismatch) and run.error.rank == last and run.error.step >= 0
    is_right = is_right and place is not None and place.groups() == (str(layer), str(last))
    return "" if is_right else f"{expected}; it ended with {ended}"


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
            f"{them}; use longer prompts or more tokens (or, for a model of few experts, --placement strided)"
        )
