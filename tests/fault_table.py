"""The fault table of docs/reliability.md, read from the page itself: what the page says is what is tested.

A cell is a list, and a row stands for all combinations of its victims, phases and faults. Those whose three words all
bear a star, or stand alone in a cell of a row with stars, are telling enough for every run of the tests.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

VICTIMS = ("coordinator", "rank 0", "last rank")
PHASES = ("spawn", "load", "ready", "prompt", "decode", "idle", "shutdown", "recovery")
FAULTS = (
    "SIGKILL",
    "SIGSTOP",
    "exception",
    "deadline",
    "closed socket",
    "corrupt message",
    "disk full",
    "unreadable weights",
)
HEADER = ["victim", "phase", "fault", "outcome", "told", "exit code"]


@dataclass(frozen=True)
class Case:
    """One combination. `told` is the text of the page, with its letters that stand for numbers."""

    victim: str
    phase: str
    fault: str
    outcome: str
    told: str
    exit_code: int
    is_telling: bool

    @property
    def combination(self) -> tuple[str, str, str]:
        return self.victim, self.phase, self.fault

    def is_told_in(self, text: str, rank: int) -> bool:
        return re.search(pattern_of(self.told, rank), text, re.DOTALL) is not None


def pattern_of(told: str, rank: int) -> str:
    """As a regular expression: R is the victim's rank, N any number, … anything."""
    pattern = re.escape(told).replace(re.escape("…"), ".*")
    return re.sub(r"\bN\b", r"[\\d.]+", re.sub(r"\bR\b", str(rank), pattern))


def read_cases(page: Path) -> list[Case]:
    rows = [cells_of(line) for line in page.read_text().splitlines() if line.startswith("|")]
    begin = rows.index(HEADER) + 2
    cases = []
    for cells in itertools.takewhile(lambda cells: len(cells) == len(HEADER), rows[begin:]):
        cases += cases_of(*cells)
    return cases


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def cases_of(victims: str, phases: str, faults: str, outcome: str, told: str, exit_code: str) -> list[Case]:
    words = [cell.split(", ") for cell in (victims, phases, faults)]
    has_stars = any(word.endswith("*") for cell in words for word in cell)
    return [
        Case(
            *(word.removesuffix("*") for word in combination),
            outcome=outcome,
            told=told.strip("`"),
            exit_code=int(exit_code),
            is_telling=has_stars
            and all(word.endswith("*") or len(cell) == 1 for word, cell in zip(combination, words, strict=True)),
        )
        for combination in itertools.product(*words)
    ]


WITHOUT_A_ROW = re.compile(r"^- \*\*(.+?); (.+?); (.+?)\*\*: ", re.MULTILINE)
"""A sentence for combinations that make no sense: `- **victims; phases; faults**: the reason.`"""


def read_senseless(page: Path) -> list[tuple[str, ...]]:
    text = page.read_text()
    return [
        combination
        for victims, phases, faults in WITHOUT_A_ROW.findall(text)
        for combination in itertools.product(*(cell.split(", ") for cell in (victims, phases, faults)))
    ]
