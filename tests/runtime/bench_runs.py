"""Runs of the suites of the benchmark, as small as can be."""

from leafsum.ranks.tiny import ensure_tiny
from leafsum.runtime.bench.options import BenchModel, BenchOptions, Shape
from leafsum.runtime.bench.results import Results
from leafsum.runtime.bench.rounds import Rounds
from leafsum.runtime.settings import Settings

OF_CPU = (
    "ms of CPU a step, rank outside kernels",
    "% of a core, rank outside kernels",
    "ms of CPU a step, coordinator",
    "ms of CPU a step, program",
)
OF_RANKS = ("% in transport calls", "% in exchanges")
"""Figures of decode, besides its rate."""


def small_options() -> BenchOptions:
    return BenchOptions(
        settings=Settings(threads=1),
        models=(BenchModel("tiny", ensure_tiny()),),
        shapes=(Shape(64, 48), Shape(32, 16)),
        num_rows=3,
        rank_counts=(1, 2),
        with_transformers=False,
        prompt_tokens=8,
        new_tokens=4,
        num_requests=1,
        long_prompt_tokens=16,
        gather_bytes=10240,
        gather_ranks=(4,),
        gather_calls=3,
        read_bytes=1 << 16,
        wait_s=0.5,
    )


def measure(suite, names, options):
    """What one round finds."""
    results = Results()
    suite.measure(names, options, Rounds(1, lambda _: None), results)
    assert all(len(series.samples) == 1 and series.median >= 0 for series in results.series)
    return results
