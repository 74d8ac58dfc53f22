"""Hazards: what a careless sum would treat otherwise. A receipt shows which of them its arms have met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .run import ArmResult

ROUTER_TIES = "router_ties"

HAZARDS = (ROUTER_TIES, "subnormals", "negative_zeros")
"""Names in RankWitness.hazards. A tie counts where it crosses the border of two ranks."""


def hazard_totals(result: ArmResult) -> dict[str, int]:
    """The counts of all ranks of one arm, added."""
    ranks = result.witness.ranks if result.witness else ()
    return {name: sum(rank.hazards.get(name, 0) for rank in ranks) for name in HAZARDS}


@dataclass(frozen=True, slots=True)
class HazardReport:
    """`missing`: hazards that the arms could have met, and did not; `impossible`: those that they could not."""

    missing: tuple[str, ...] = ()
    impossible: tuple[str, ...] = ()

    @classmethod
    def of(cls, results: Sequence[ArmResult]) -> HazardReport:
        totals = [hazard_totals(result) for result in results]
        absent = [name for name in HAZARDS if not any(total[name] for total in totals)]
        has_border = any(result.arm.tp > 1 for result in results)
        return cls(
            missing=tuple(name for name in absent if has_border or name != ROUTER_TIES),
            impossible=() if has_border else (ROUTER_TIES,),
        )

    def faults(self) -> list[str]:
        return [f"expected {name} in at least one arm, found none in any" for name in self.missing]

    def not_shown(self) -> list[str]:
        return [f"{name}: no arm has met any" for name in self.missing] + [
            f"{name}: no arm has more than one rank" for name in self.impossible
        ]
