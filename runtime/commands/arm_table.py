"""The table of a receipt's arms: drawn on a terminal, plain columns in a pipe."""

from __future__ import annotations

from collections.abc import Sequence

from ..receipts.table import plain_table, rich_table
from .stdio import on_terminal, write_line


def show_table(rows: Sequence[tuple[str, ...]]) -> None:
    if on_terminal():
        from rich.console import Console

        Console().print(rich_table(rows))
        return
    for line in plain_table(rows):
        write_line(line)
