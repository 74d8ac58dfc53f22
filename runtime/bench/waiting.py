"""The suite `waiting`: CPU time of processes that have nothing to do, and of those that wait for a late rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from contextlib import ExitStack

from ...ranks.tiny import ensure_tiny
from .helper import Helper
from .options import BenchOptions
from .results import Results
from .rounds import Rounds, Variant, median_of

FIGURE = "ms/s of CPU"
PROGRAM, COORDINATOR, RANK = f"{FIGURE}, program", f"{FIGURE}, coordinator", f"{FIGURE}, rank"


def measure(_names: Collection[str], options: BenchOptions, rounds: Rounds, results: Results) -> None:
    """A pool of the demonstration model at every rank count: what a wait costs does not depend on the model."""
    idle: list[Variant] = []
    held_up: list[Variant] = []
    with ExitStack() as stack:
        for tp in options.rank_counts:
            rounds.on_stage(f"waiting: starting a pool, tp {tp}")
            waiter = _open_waiter(stack, options, tp)
            idle.append(Variant(f"idle pool, tp {tp}", _asked(waiter, None)))
            if tp > 1:
                held_up.append(Variant(f"last rank late, tp {tp}", _asked(waiter, tp - 1)))
        series = rounds.run("waiting", [*idle, *held_up])
    results.series += series
    results.values["idle"] = max(
        median_of(series, variant.name, figure) for variant in idle for figure in (PROGRAM, COORDINATOR, RANK)
    )
    if held_up:
        results.values["late"] = max(median_of(series, variant.name, RANK) for variant in held_up)


def _open_waiter(stack: ExitStack, options: BenchOptions, tp: int) -> Helper:
    settings = options.pool_settings(ensure_tiny(), tp).to_dict()
    arguments = [json.dumps(settings), str(options.wait_s)]
    return stack.enter_context(Helper(f"a pool, tp {tp}", "leafsum.runtime.bench.waiter", arguments))


def _asked(waiter: Helper, late_rank: int | None) -> Callable[[], dict[str, float]]:
    """Of the ranks that wait, the one that used most."""

    def measure_once() -> dict[str, float]:
        used = waiter.ask({"late_rank": late_rank})
        most = max(value for name, value in used.items() if name.startswith("rank "))
        return {PROGRAM: used["program"], COORDINATOR: used["coordinator"], RANK: most}

    return measure_once
