"""Progress of a long command: a line on the terminal that goes away at the end, and nothing at all in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from ..witness import Progress


class Display:
    """What is being done, on standard error when that is a terminal. Also a context manager."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._stage = ""

    def __enter__(self) -> Display:
        if sys.stderr is not None and sys.stderr.isatty():
            # rich takes longer to import than a pipe's whole command line takes to parse
            from rich.console import Console
            from rich.progress import Progress as Bar
            from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task("")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Show nothing more: the terminal is the result's. Safe to call again."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def stage(self, text: str) -> None:
        """Name what begins now."""
        self._stage = text
        self._show("")

    @property
    def on_progress(self) -> Callable[[Progress], None] | None:
        """For WorkerPool.generate(on_progress=...); None where nobody looks, so that nothing is counted for it."""
        return None if self._bar is None else self._count

    def _count(self, progress: Progress) -> None:
        self._show(
            f": {progress.finished_prompts}/{progress.total_prompts} prompts, {progress.prompt_tokens_done:,} prompt "
            f"tokens read, {progress.output_tokens:,} tokens written"
        )

    def _show(self, detail: str) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=self._stage + detail)
