"""The suite `startup`: how long a user waits, from the start of a process."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from ...errors import DeadlineExceeded, LeafsumError
from ..child import describe_exit
from ..settings import variable_of
from .options import BenchOptions
from .results import Results
from .rounds import Rounds, Variant, median_of

SECONDS = "s"
FIRST_TOKEN, DEMO, HELP = "leafsum demo, to its first text", "leafsum demo, to its last line", "leafsum --help"
FIRST_TEXT = re.compile(rb"^tp 1: text {9}.", re.MULTILINE)
"""What `leafsum demo` has written when the first character of its first text is there."""

TIMEOUT_S = 300.0
"""The longest that a process may take."""


def measure(_names: Collection[str], _options: BenchOptions, rounds: Rounds, results: Results) -> None:
    """Fresh processes one after the other; the warm-up round has filled the file cache."""
    variants = [
        Variant(FIRST_TOKEN, timed(["leafsum", "demo"], FIRST_TEXT)),
        Variant(DEMO, timed(["leafsum", "demo"])),
        Variant(HELP, timed(["leafsum", "--help"])),
    ]
    series = rounds.run("startup", variants)
    results.series += series
    results.values["first_token"] = median_of(series, FIRST_TOKEN, SECONDS)
    results.values["help"] = median_of(series, HELP, SECONDS)


def timed(
    arguments: Sequence[str], until: re.Pattern[bytes] | None = None, timeout_s: float = TIMEOUT_S
) -> Callable[[], dict[str, float]]:
    """Seconds from the start of `python -m ARGUMENTS` to its end, or to its output's first match of `until`.

    Raises LeafsumError where it fails or never writes that, DeadlineExceeded. The process has ended then.
    """

    def measure_once() -> dict[str, float]:
        begin_s, seen_s, said = time.perf_counter(), 0.0, b""
        with _started(arguments) as process:
            for piece in _pieces(process, arguments, timeout_s):
                said += piece
                if until is not None and not seen_s and until.search(said):
                    seen_s = time.perf_counter()
            try:
                exit_status = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise _late(arguments, timeout_s) from None
            end_s = time.perf_counter()
        if exit_status or (until is not None and not seen_s):
            wanted = "to succeed" if until is None else f"to write {until.pattern.decode()!r}, and to succeed"
            last_words = said.decode(errors="replace").strip()[-500:]
            text = f"expected {_named(arguments)} {wanted}, found {describe_exit(exit_status)}"
            raise LeafsumError(f"{text}: {last_words}")
        return {SECONDS: (seen_s or end_s) - begin_s}

    return measure_once


@contextmanager
def _started(arguments: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Killed at the end of the block where it has not ended; what it started ends with it."""
    command = [sys.executable, "-P", "-m", *arguments]
    pipe, env = subprocess.PIPE, os.environ | {variable_of("recover"): "never"}  # a recovery would hide in a figure
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT, env=env) as process:
        try:
            yield process
        finally:
            process.kill()  # without effect on one that was waited for


def _pieces(process: subprocess.Popen[bytes], arguments: Sequence[str], timeout_s: float) -> Iterator[bytes]:
    """What it writes, as it comes, to the end of its output. Raises DeadlineExceeded."""
    assert process.stdout is not None
    deadline_s = time.monotonic() + timeout_s
    output = select.poll()
    output.register(process.stdout, select.POLLIN)
    while output.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
        piece = os.read(process.stdout.fileno(), 1 << 16)
        if not piece:
            return
        yield piece
    raise _late(arguments, timeout_s)


def _late(arguments: Sequence[str], timeout_s: float) -> DeadlineExceeded:
    what = f"the end of {_named(arguments)}"
    text = f"expected {what} within {timeout_s:g} s, found it running; it was killed"
    return DeadlineExceeded(text, what=what, timeout_s=timeout_s)


def _named(arguments: Sequence[str]) -> str:
    return f"`python -m {' '.join(arguments)}`"
