"""A run of the benchmark as tables: what was measured, and the aims with their words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .aims import judged
from .results import Results

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class Columns:
    """A table as text: `names` of columns, of which those in `numeric` stand to the right."""

    names: tuple[str, ...]
    numeric: frozenset[int]
    rows: tuple[tuple[str, ...], ...]

    def plain(self) -> Iterator[str]:
        """Columns separated by two spaces, for a pipe."""
        lines = [self.names, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.names))]
        for line in lines:
            cells = [
                cell.rjust(width) if column in self.numeric else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            yield "  ".join(cells).rstrip()

    def rich(self) -> Table:
        from rich.table import Table

        table = Table()
        for column, name in enumerate(self.names):
            table.add_column(name, justify="right" if column in self.numeric else "left")
        for row in self.rows:
            table.add_row(*row)
        return table


def measured(results: Results) -> Columns:
    """One row a figure of a variant."""
    rows = tuple(
        (
            series.suite,
            series.model or "-",
            series.variant,
            number(series.median),
            number(min(series.samples)),
            number(max(series.samples)),
            series.figure,
        )
        for series in results.series
    )
    return Columns(("suite", "model", "variant", "median", "min", "max", "unit"), frozenset({3, 4, 5}), rows)


def aims(results: Results) -> Columns:
    """One row an aim, measured or not."""
    rows = tuple(
        (aim.suite, aim.text, aim.target, "-" if value is None else f"{number(value)} {aim.unit}", aim.word(value))
        for aim, value in judged(results.values)
    )
    return Columns(("suite", "aim", "target", "measured", "word"), frozenset({2, 3}), rows)


def heading(found: dict[str, Any]) -> str:
    """Where and how it was measured, in one line, from the run's document."""
    machine, code, packages = found["machine"], found["code"], found["packages"]
    commit = "" if code["commit"] == "unknown" else f" ({code['commit'][:12]}{', changed' if code['changed'] else ''})"
    return (
        f"{machine['cpu']}, {machine['cores']} cores, kernels {machine['instruction_set']}; "
        f"leafsum {code['version']}{commit}, torch {packages['torch']}, numpy {packages['numpy']}, "
        f"transformers {packages['transformers']}; {found['rounds']} rounds after a warm-up"
    )


def number(value: float) -> str:
    """Three digits, or all before the point: 1,234 or 12.3 or 0.0123."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def failures(results: Results) -> Sequence[str]:
    """One line a suite that failed."""
    return [f"{suite} failed: {error}" for suite, error in results.failures.items()]
