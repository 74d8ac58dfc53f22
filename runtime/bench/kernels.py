"""The suite `kernels`: what the machine could do at best, and what the linear kernel does, on one thread.

One row is bound by memory: every weight is read once, so it is held against the fastest way found here to read memory.
Many rows are bound by arithmetic, so they are held against torch's float32 matmul on the same numbers. `blocks` has the
kernels of Flash Next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ... import _C
from . import blocks
from .options import BenchOptions, Shape
from .results import Results
from .rounds import Rounds, Series, Variant, median_of

DTYPE = "bfloat16"
DTYPE_BYTES = 2
AIM_ROWS = 256
GBYTES, GFLOPS = "GB/s", "GFLOP/s"


def measure(_names: Collection[str], options: BenchOptions, rounds: Rounds, results: Results) -> None:
    """Adds bandwidth and rates, and the shares of the first shape."""
    with _one_thread():
        rounds.on_stage("kernels: filling memory")
        reads = _reads(options.read_bytes)
        of_blocks = blocks.variants(options.read_bytes)
        series = rounds.run("kernels", [*reads, *_one_row_variants(options), *of_blocks])
        results.series += series
        best_read = max(median_of(series, read.name, GBYTES) for read in reads)
        one_row = median_of(series, _one_row_name(options.shapes[0]), GBYTES)
        results.values["linear_1_row"] = 100 * one_row / best_read
        for shape in options.shapes:
            series = _many_rows(options, shape, rounds)
            results.series += series
            if shape == options.shapes[0] and options.num_rows == AIM_ROWS:
                ours, theirs = (median_of(series, each.variant, GFLOPS) for each in series)
                results.values["linear_256_rows"] = 100 * ours / theirs


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread for the kernels and for torch, in this process, until the end of the suite."""
    import torch

    num_threads, num_torch_threads = _C.num_threads(), torch.get_num_threads()
    _C.set_num_threads(1)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        _C.set_num_threads(num_threads)
        torch.set_num_threads(num_torch_threads)


def _reads(num_bytes: int) -> list[Variant]:
    """Ways to read a buffer far larger than the caches. Which is fastest depends on the machine: the best counts."""
    import torch

    doubles = np.ones(num_bytes // 8)
    integers, tensor = doubles.view(np.int64), torch.from_numpy(doubles)
    singles, longs = tensor.view(torch.float32), tensor.view(torch.int64)
    ways: dict[str, Callable[[], Any]] = {
        "numpy max int64": integers.max,
        "torch sum float32": singles.sum,
        "torch sum float64": tensor.sum,
        "torch sum int64": longs.sum,
    }
    return [Variant(f"read memory, {name}", _rate(way, num_bytes / 1e9, GBYTES)) for name, way in ways.items()]


def _one_row_variants(options: BenchOptions) -> list[Variant]:
    return [Variant(_one_row_name(shape), _one_row(shape, options.read_bytes)) for shape in options.shapes]


def _one_row_name(shape: Shape) -> str:
    return f"linear 1 row, {shape}, {DTYPE}"


def _one_row(shape: Shape, read_bytes: int) -> Callable[[], dict[str, float]]:
    """One call on each of several copies of the weight, together at least `read_bytes`: none is found in a cache."""
    weight_bytes = shape.num_inputs * shape.num_outputs * DTYPE_BYTES
    packed = _packed(_random(shape.num_outputs, shape.num_inputs))
    copies = [packed.copy() for _ in range(max(1, -(-read_bytes // weight_bytes)))]
    row = _random(1, shape.num_inputs)

    def call_all() -> None:
        for copy in copies:
            _C.linear(row, copy, DTYPE, shape.num_outputs, 0, None)

    return _rate(call_all, len(copies) * weight_bytes / 1e9, GBYTES)


def _many_rows(options: BenchOptions, shape: Shape, rounds: Rounds) -> tuple[Series, ...]:
    """The linear kernel and torch's matmul, in turns."""
    import torch

    num_rows, gigaflops = options.num_rows, 2e-9 * options.num_rows * shape.num_inputs * shape.num_outputs
    rows, weight = _random(num_rows, shape.num_inputs), _random(shape.num_outputs, shape.num_inputs)
    packed = _packed(weight)
    torch_rows, torch_weight = torch.from_numpy(rows), torch.from_numpy(weight)

    def ours() -> None:
        _C.linear(rows, packed, DTYPE, shape.num_outputs, 0, None)

    def theirs() -> None:
        torch.nn.functional.linear(torch_rows, torch_weight)

    return rounds.run(
        "kernels",
        [
            Variant(f"linear {num_rows} rows, {shape}, {DTYPE}", _rate(ours, gigaflops, GFLOPS)),
            Variant(f"torch matmul {num_rows} rows, {shape}, float32", _rate(theirs, gigaflops, GFLOPS)),
        ],
    )


def _rate(work: Callable[[], Any], amount: float, figure: str) -> Callable[[], dict[str, float]]:
    """Measures `amount` of work a second."""

    def measure_once() -> dict[str, float]:
        begin_s = time.perf_counter()
        work()
        return {figure: amount / (time.perf_counter() - begin_s)}

    return measure_once


def _random(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(1).standard_normal(shape, dtype=np.float32)


def _packed(weight: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, Any]:
    return _C.pack_weight(_C.narrow(weight, DTYPE), DTYPE)
