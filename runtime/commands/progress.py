"""Progress of a long command: a line on the terminal that goes away at the end, and nothing at all in a pipe."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


class Counts(Protocol):
    """What a pool reports while it generates (runtime.pool.Progress)."""

    @property
    def finished_prompts(self) -> int: ...
    @property
    def total_prompts(self) -> int: ...
    @property
    def prompt_tokens_done(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...


class Display:
    """What is being done, on standard error when that is a terminal. Also a context manager."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._stage = ""

    def __enter__(self) -> Display:
        if sys.stderr is not None and sys.stderr.isatty():
            # rich takes longer to import than a pipe's whole command line takes to parse
            from rich.console import Console
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task("")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def stage(self, text: str) -> None:
        """Name what begins now."""
        self._stage = text
        self._show("")

    def on_progress(self, counts: Counts) -> None:
        """For WorkerPool.generate(on_progress=...)."""
        self._show(
            f": {counts.finished_prompts}/{counts.total_prompts} prompts, {counts.prompt_tokens_done:,} prompt tokens "
            f"read, {counts.output_tokens:,} tokens written"
        )

    def _show(self, detail: str) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=self._stage + detail)
