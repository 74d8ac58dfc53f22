"""The suite `startup`: how long a user waits, from the start of a process."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence

from ...errors import LeafsumError
from ..child import describe_exit
from .options import BenchOptions
from .results import Results
from .rounds import Rounds, Variant, median_of

SECONDS = "s"
FIRST_TOKEN, DEMO, HELP = "tiny at tp 1, to its first token", "leafsum demo, to its last line", "leafsum --help"


def measure(_names: Collection[str], _options: BenchOptions, rounds: Rounds, results: Results) -> None:
    """Fresh processes one after the other; the warm-up round has filled the file cache."""
    variants = [
        Variant(FIRST_TOKEN, timed_to_first_line(["leafsum.runtime.bench.first_token"])),
        Variant(DEMO, timed_to_end(["leafsum", "demo"])),
        Variant(HELP, timed_to_end(["leafsum", "--help"])),
    ]
    series = rounds.run("startup", variants)
    results.series += series
    results.values["first_token"] = median_of(series, FIRST_TOKEN, SECONDS)
    results.values["help"] = median_of(series, HELP, SECONDS)


def timed_to_first_line(arguments: Sequence[str]) -> Callable[[], dict[str, float]]:
    """Seconds from the start of `python -m ARGUMENTS` to its first line on standard output."""

    def measure_once() -> dict[str, float]:
        begin_s = time.perf_counter()
        with _started(arguments) as process:
            assert process.stdout is not None
            process.stdout.readline()
            taken_s = time.perf_counter() - begin_s
            _require_success(process, arguments)
        return {SECONDS: taken_s}

    return measure_once


def timed_to_end(arguments: Sequence[str]) -> Callable[[], dict[str, float]]:
    """Seconds from the start of `python -m ARGUMENTS` to its end."""

    def measure_once() -> dict[str, float]:
        begin_s = time.perf_counter()
        with _started(arguments) as process:
            _require_success(process, arguments)
        return {SECONDS: time.perf_counter() - begin_s}

    return measure_once


def _started(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", *arguments]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _require_success(process: subprocess.Popen[bytes], arguments: Sequence[str]) -> None:
    said, _ = process.communicate()
    if process.returncode:
        raise LeafsumError(
            f"expected `python -m {' '.join(arguments)}` to succeed, found {describe_exit(process.returncode)}: "
            f"{said.decode(errors='replace').strip()[-500:]}"
        )
