"""Runs the suites that were chosen, in one order, and goes on where one of them fails."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ...errors import LeafsumError
from .options import BenchOptions
from .results import Results
from .rounds import Rounds

Measure = Callable[[Collection[str], BenchOptions, Rounds, Results], None]


def run_suites(chosen: Collection[str], options: BenchOptions, rounds: Rounds) -> Results:
    """Everything that was measured. A suite's LeafsumError is kept in `failures`; whatever else comes is raised."""
    results = Results()
    for suites, measure in _parts():
        names = [suite for suite in suites if suite in chosen]
        if not names:
            continue
        try:
            measure(names, options, rounds, results)
        except LeafsumError as error:
            results.failures |= dict.fromkeys(names, str(error))
    return results


def _parts() -> tuple[tuple[tuple[str, ...], Measure], ...]:
    """Who measures what. decode and prompt are one part: they take turns on the same processes."""
    from . import generation, kernels, startup, transport, waiting

    return (
        (("kernels",), kernels.measure),
        (("decode", "prompt"), generation.measure),
        (("waiting",), waiting.measure),
        (("transport",), transport.measure),
        (("startup",), startup.measure),
    )
