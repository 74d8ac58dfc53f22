"""The suites `decode` and `prompt`: tokens a second of a pool at several rank counts, and of transformers beside it.

All processes are there for all rounds and sleep while another is measured. One request at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from ...errors import LeafsumError
from ...ranks.configs.load import load_spec
from ..pool import WorkerPool
from ..sampling import SamplingParams
from ..witness import Progress, Witness
from .helper import Helper
from .model import ensure_bench_model
from .options import BenchOptions
from .results import Results
from .rounds import Rounds, Series, Variant, median_of

RATE, CALLS, EXCHANGE = "tokens/s", "% in transport calls", "% in exchanges"
PEER_DTYPES = ("float32", "bfloat16")
AIM_TP = 2
"""The rank count whose exchanges are held against the aim."""

ATTEMPTS = 5
"""To see at least one step between the first answer of a witness and the last token."""


@dataclass(frozen=True, slots=True)
class Subject:
    """One of those that take turns: `prompt` and `decode` serve a request and say how fast."""

    name: str
    prompt: Callable[[], Mapping[str, float]]
    decode: Callable[[], Mapping[str, float]]


def measure(names: Collection[str], options: BenchOptions, rounds: Rounds, results: Results) -> None:
    """Adds rates, and the ratios of the first rank count to the better transformers."""
    rounds.on_stage("decode: making the model")
    folder = options.model_dir or ensure_bench_model()
    with ExitStack() as stack:
        rounds.on_stage("decode: starting processes")
        # The helpers load while the pools start.
        helpers = _open_helpers(stack, folder, options, results)
        pools = [_open_pool(stack, folder, options, tp) for tp in options.rank_counts]
        subjects = [*pools, *(_peer(dtype, helper, folder, options) for dtype, helper in helpers.items())]
        if "decode" in names:
            series = rounds.run("decode", [Variant(subject.name, subject.decode) for subject in subjects])
            _conclude("decode", series, pools, subjects, results)
            if AIM_TP in options.rank_counts:
                results.values["exchange"] = median_of(series, _pool_name(AIM_TP, options), EXCHANGE)
        if "prompt" in names:
            series = rounds.run("prompt", [Variant(subject.name, subject.prompt) for subject in subjects])
            _conclude("prompt", series, pools, subjects, results)


def _conclude(
    suite: str, series: tuple[Series, ...], pools: list[Subject], subjects: list[Subject], results: Results
) -> None:
    results.series += series
    peers = subjects[len(pools) :]
    if peers:
        best = max(median_of(series, peer.name, RATE) for peer in peers)
        results.values[suite] = median_of(series, pools[0].name, RATE) / best


def _pool_name(tp: int, options: BenchOptions) -> str:
    return f"leafsum, tp {tp}, {_threads(options.settings.threads)} a rank"


def _threads(num_threads: int) -> str:
    return f"{num_threads} thread{'s' if num_threads > 1 else ''}"


def _prompt_ids(folder: Path, num_tokens: int) -> list[int]:
    """The same ids for everybody."""
    ids: list[int] = np.random.default_rng(5).integers(0, load_spec(folder).vocab_size, num_tokens).tolist()
    return ids


def _open_pool(stack: ExitStack, folder: Path, options: BenchOptions, tp: int) -> Subject:
    settings = replace(options.settings, model=str(folder), tp=tp, concurrency=1)
    pool = stack.enter_context(WorkerPool(settings))
    prompt_ids = _prompt_ids(folder, options.prompt_tokens)
    long_prompt_ids = _prompt_ids(folder, options.long_prompt_tokens)

    def decode() -> dict[str, float]:
        return _decode(pool, prompt_ids, options.new_tokens)

    def prompt() -> dict[str, float]:
        begin_s = time.perf_counter()
        return {RATE: len(long_prompt_ids) / (_token_times_s(pool, long_prompt_ids, 1)[0] - begin_s)}

    return Subject(_pool_name(tp, options), prompt, decode)


def _decode(pool: WorkerPool, prompt_ids: list[int], num_tokens: int) -> dict[str, float]:
    """The rate after the first token; at several ranks also what share of these steps goes where, a mean over ranks."""
    for _ in range(ATTEMPTS):
        begun: list[tuple[Witness, float]] = []

        def begin(begun: list[tuple[Witness, float]] = begun) -> None:
            # Answered between two steps: counts and time begin together, a step or two after the first token.
            begun.append((pool.witness(), time.perf_counter()))

        times_s = _token_times_s(pool, prompt_ids, num_tokens, begin if pool.settings.tp > 1 else None)
        rate = {RATE: (num_tokens - 1) / (times_s[-1] - times_s[0])}
        if not begun:
            return rate
        ((before, begin_s),) = begun
        done = pool.witness().since(before)
        if done.steps:
            whole_ns = len(done.ranks) * (times_s[-1] - begin_s) * 1e9
            calls_ns = sum(rank.wait_ns for rank in done.ranks)
            exchange_ns = sum(rank.exchange_ns for rank in done.ranks)
            return rate | {CALLS: 100 * calls_ns / whole_ns, EXCHANGE: 100 * exchange_ns / whole_ns}
    text = f"expected steps to measure after the first of {num_tokens} tokens, found none left each time"
    raise LeafsumError(f"{text}; raise --new-tokens")


def _token_times_s(
    pool: WorkerPool, prompt_ids: list[int], num_tokens: int, on_first: Callable[[], None] | None = None
) -> list[float]:
    """When each token of one request came. Raises LeafsumError where the request failed."""
    times_s: list[float] = []

    def on_progress(progress: Progress) -> None:
        if progress.output_tokens > len(times_s):
            times_s.append(time.perf_counter())
            if on_first is not None and len(times_s) == 1:
                on_first()

    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    (completion,) = pool.generate([prompt_ids], sampling, on_progress=on_progress)
    if completion.error:
        raise LeafsumError(f"the request that is measured failed at tp {pool.settings.tp}: {completion.error}")
    return times_s


def _open_helpers(stack: ExitStack, folder: Path, options: BenchOptions, results: Results) -> dict[str, Helper]:
    """transformers by dtype; none, and a note, where it is not wanted or not installed."""
    if not options.with_transformers:
        return {}
    if find_spec("transformers") is None:
        results.notes.append("transformers is not installed here: nothing to compare decode and prompt with")
        return {}
    num_threads = str(options.settings.threads)
    env = {"OMP_NUM_THREADS": num_threads, "HF_HUB_OFFLINE": "1"}
    return {
        dtype: stack.enter_context(
            Helper(f"transformers in {dtype}", "leafsum.runtime.bench.peer", [str(folder), dtype, num_threads], env)
        )
        for dtype in PEER_DTYPES
    }


def _peer(dtype: str, helper: Helper, folder: Path, options: BenchOptions) -> Subject:
    prompt_ids = _prompt_ids(folder, options.prompt_tokens)
    long_prompt_ids = _prompt_ids(folder, options.long_prompt_tokens)

    def decode() -> dict[str, float]:
        answer = helper.ask({"prompt_ids": prompt_ids, "new_tokens": options.new_tokens})
        return {RATE: (options.new_tokens - 1) / answer["decode_s"]}

    def prompt() -> dict[str, float]:
        answer = helper.ask({"prompt_ids": long_prompt_ids, "new_tokens": 1})
        return {RATE: len(long_prompt_ids) / answer["prompt_s"]}

    return Subject(f"transformers, {dtype}, {_threads(options.settings.threads)}", prompt, decode)
