"""The receipt as a table: one row an arm, with its hash, verdict and counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .hashes import SHOWN_DIGITS
from .run import ArmResult
from .verdict import Verdict

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("arm", "hash", "equal", "exchanges", "bytes sent per rank", "most rows", "most requests")


def table_rows(results: Sequence[ArmResult], verdict: Verdict, has_reference: bool = True) -> list[tuple[str, ...]]:
    """`has_reference`: the first result is what the others are compared with."""
    words = [verdict.word_of(result.arm) for result in results]
    if has_reference and words[0] == "equal":
        words[0] = "reference"
    return [_row(result, word) for word, result in zip(words, results, strict=True)]


def _row(result: ArmResult, word: str) -> tuple[str, ...]:
    witness = result.witness
    assert witness is not None, "a table shows arms that ran here"
    return (
        result.arm.name,
        result.hashes_sha256[:SHOWN_DIGITS],
        word,
        f"{max(rank.exchanges for rank in witness.ranks):,}",
        f"{max(rank.bytes_sent for rank in witness.ranks):,}",
        f"{witness.most_rows:,}",
        f"{witness.most_live_requests:,}",
    )


def plain_table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns separated by two spaces, for a pipe."""
    lines = [COLUMNS, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def rich_table(rows: Sequence[tuple[str, ...]]) -> Table:
    from rich.table import Table

    table = Table()
    for column, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if column < 3 else "right")
    for row in rows:
        table.add_row(*row)
    return table
