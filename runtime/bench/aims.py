"""The aims of the CPU path: what a measurement is held against, and the word it gets. Aims, not tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .options import FAMILIES


@dataclass(frozen=True, slots=True)
class Aim:
    """`key` is what a suite reports its value under. `at_least`: more is better; else the bound is an upper one."""

    key: str
    suite: str
    text: str
    bound: float
    unit: str
    at_least: bool

    def word(self, value: float | None) -> str:
        """pass, miss, or not measured."""
        if value is None:
            return "not measured"
        return "pass" if (value >= self.bound if self.at_least else value < self.bound) else "miss"

    @property
    def target(self) -> str:
        return f"{'>=' if self.at_least else '<'} {self.bound:g} {self.unit}"

    def to_dict(self, value: float | None) -> dict[str, Any]:
        return {
            "suite": self.suite,
            "aim": self.text,
            "target": self.target,
            "value": value,
            "unit": self.unit,
            "word": self.word(value),
        }


AIMS = (
    Aim("linear_1_row", "kernels", "linear at 1 row, of memory read bandwidth", 60, "%", at_least=True),
    Aim("linear_256_rows", "kernels", "linear at 256 rows, of torch's float32 matmul", 60, "%", at_least=True),
    *(
        Aim(f"decode {family}", "decode", f"decode of {family}, against transformers", 3, "x", at_least=True)
        for family in FAMILIES
    ),
    *(
        Aim(
            f"exchange {family}",
            "decode",
            f"exchange and waiting at tp 2, of a decode step of {family}",
            15,
            "%",
            at_least=False,
        )
        for family in FAMILIES
    ),
    *(
        Aim(f"prompt {family}", "prompt", f"prompt of {family}, against transformers", 1, "x", at_least=True)
        for family in FAMILIES
    ),
    Aim("idle", "waiting", "CPU of every process of an idle pool", 5, "ms/s", at_least=False),
    Aim("late", "waiting", "CPU of a rank that waits for a late one", 10, "ms/s", at_least=False),
    Aim("all_gather", "transport", "all-gather of 10 KiB, 4 ranks, shared memory", 0.2, "ms", at_least=False),
    Aim("first_token", "startup", "leafsum demo, to its first character of text", 5, "s", at_least=False),
    Aim("help", "startup", "leafsum --help", 0.3, "s", at_least=False),
)
"""Of a model of another family, decode and prompt are measured and not judged."""


def judged(values: Mapping[str, float]) -> list[tuple[Aim, float | None]]:
    """Every aim with what was measured for it, None where nothing was."""
    return [(aim, values.get(aim.key)) for aim in AIMS]
