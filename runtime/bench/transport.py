"""The suite `transport`: how long an all-gather takes, over shared memory and over Gloo, at several rank counts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection
from contextlib import ExitStack

from ..run_folder import RunFolder
from .helper import Helper
from .options import BenchOptions
from .results import Results
from .rounds import Rounds, Variant, median_of

TRANSPORTS = {"shared": "shared memory", "gloo": "Gloo"}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""The gang is forked from one process, which must not have threads yet."""

MEDIAN, P95 = "ms, median", "ms, p95"
AIM_BYTES, AIM_RANKS = 10 * 1024, 4


def measure(_names: Collection[str], options: BenchOptions, rounds: Rounds, results: Results) -> None:
    """Both transports take turns at each rank count. A sample is the median, or the p95, of a round's calls."""
    for num_ranks in options.gather_ranks:
        rounds.on_stage(f"transport: starting {num_ranks} ranks twice")
        with ExitStack() as stack:
            variants = [
                Variant(_name(transport, options.gather_bytes, num_ranks), _timed(stack, transport, num_ranks, options))
                for transport in TRANSPORTS
            ]
            series = rounds.run("transport", variants)
        results.series += series
        if (num_ranks, options.gather_bytes) == (AIM_RANKS, AIM_BYTES):
            results.values["all_gather"] = median_of(series, variants[0].name, MEDIAN)


def _name(transport: str, num_bytes: int, num_ranks: int) -> str:
    return f"{TRANSPORTS[transport]}, {num_bytes:,} bytes, {num_ranks} ranks"


def _timed(stack: ExitStack, transport: str, num_ranks: int, options: BenchOptions) -> Callable[[], dict[str, float]]:
    """Starts a gang, which lives as long as `stack`."""
    folder = RunFolder.make()  # one that a killed benchmark leaves is removed by the next run
    stack.callback(folder.remove)
    arguments = [transport, str(num_ranks), str(folder.store(0))]
    gang = stack.enter_context(Helper(f"{num_ranks} {transport} ranks", "leafsum.ranks.latency", arguments, ONE_THREAD))
    question = {"num_bytes": options.gather_bytes, "num_calls": options.gather_calls}

    def measure_once() -> dict[str, float]:
        times_ms = [1000 * time_s for time_s in gang.ask(question)["seconds"]]
        return {MEDIAN: statistics.median(times_ms), P95: percentile(times_ms, 95)}

    return measure_once


def percentile(values: list[float], percent: int) -> float:
    """The least value that at least `percent` of the values do not exceed."""
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)]
