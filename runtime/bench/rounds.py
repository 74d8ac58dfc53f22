"""Rounds: every variant takes its turn in each (A B A B, never all of A and then all of B), after one warm-up round.

What drifts (clock, temperature, neighbours) then meets all variants alike. The warm-up of each is thrown away.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to do the work. `measure` does it once and says how it went: {"tokens/s": 41.7}, always the same keys."""

    name: str
    measure: Callable[[], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Series:
    """One figure of one variant, a sample a round. The figure's name holds its unit. `model`: "" without one."""

    suite: str
    variant: str
    figure: str
    samples: tuple[float, ...]
    model: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def to_dict(self) -> dict[str, Any]:
        spread = {"median": self.median, "min": min(self.samples), "max": max(self.samples)}
        names = {"suite": self.suite, "model": self.model, "variant": self.variant, "figure": self.figure}
        return names | spread | {"samples": self.samples}


@dataclass(frozen=True, slots=True)
class Rounds:
    """How often to measure; `on_stage` hears what begins."""

    num_rounds: int
    on_stage: Callable[[str], None]

    def run(self, suite: str, variants: Sequence[Variant], model: str = "") -> tuple[Series, ...]:
        """All rounds of these variants, on one model if on any. The series come by variant, in the order given."""
        samples: dict[tuple[str, str], list[float]] = {}
        for number in range(self.num_rounds + 1):
            for variant in variants:
                where = f"{suite}, {model}" if model else suite
                self.on_stage(f"{where}: {self._round_name(number)}: {variant.name}")
                for figure, value in variant.measure().items():
                    of_figure = samples.setdefault((variant.name, figure), [])
                    if number > 0:
                        of_figure.append(value)
        order = [variant.name for variant in variants]
        series = [Series(suite, name, figure, tuple(values), model) for (name, figure), values in samples.items()]
        return tuple(sorted(series, key=lambda each: order.index(each.variant)))

    def _round_name(self, number: int) -> str:
        return f"round {number} of {self.num_rounds}" if number else "warm-up"


def median_of(series: Sequence[Series], variant: str, figure: str) -> float:
    """The median of the one series of that variant and figure."""
    (found,) = (each for each in series if (each.variant, each.figure) == (variant, figure))
    return found.median
