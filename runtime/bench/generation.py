"""The suites `decode` and `prompt`: tokens a second of a pool at several rank counts, and of transformers beside it.

One model after the other. All processes of a model are there for all its rounds, and sleep while another is measured.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from ...errors import LeafsumError
from ...ranks.configs.load import load_spec
from ..pool import WorkerPool
from ..sampling import SamplingParams
from ..witness import Progress, Witness
from .cpu import cpu_ns
from .helper import Helper
from .model import ensure_bench_model
from .options import BenchModel, BenchOptions
from .results import Results
from .rounds import Rounds, Variant, median_of

RATE, CALLS, EXCHANGE = "tokens/s", "% in transport calls", "% in exchanges"
RANK_MS, RANK_SHARE = "ms of CPU a step, rank outside kernels", "% of a core, rank outside kernels"
COORDINATOR_MS, PROGRAM_MS = "ms of CPU a step, coordinator", "ms of CPU a step, program"
AIM_TP = 2
"""The rank count whose exchanges are held against the aim."""

ATTEMPTS = 5
"""To see at least one step between the first answer of a witness and the last token."""


@dataclass(frozen=True, slots=True)
class Work:
    """What everybody gets: `prompts` of one length at once, `new_tokens` of each. `label` tells works of a suite apart;
    aims are of the work without one."""

    suite: str
    label: str
    prompts: list[list[int]]
    new_tokens: int

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(ids) for ids in self.prompts)


@dataclass(frozen=True, slots=True)
class Subject:
    """One of those that take turns. `prepare` says its name at that work, and what does the work once."""

    prepare: Callable[[Work], tuple[str, Callable[[], Mapping[str, float]]]]

    def variant(self, work: Work) -> Variant:
        name, measure = self.prepare(work)
        return Variant(f"{name}{work.label}", measure)


def measure(names: Collection[str], options: BenchOptions, rounds: Rounds, results: Results) -> None:
    """Adds rates of every model, and by its family the ratios of the first rank count to transformers."""
    if options.with_transformers and not _has_transformers():
        results.notes.append("transformers is not installed here: nothing to compare decode and prompt with")
    for model in options.models:
        _measure_model(model, names, options, rounds, results)


def _measure_model(
    model: BenchModel, names: Collection[str], options: BenchOptions, rounds: Rounds, results: Results
) -> None:
    rounds.on_stage(f"decode, {model.name}: making the model")
    folder = model.folder or ensure_bench_model(model.name)
    spec = load_spec(folder)
    with ExitStack() as stack:
        rounds.on_stage(f"decode, {model.name}: starting processes")
        # The peer loads while the pools start.
        peers = _open_peers(stack, folder, options)
        pools = [_open_pool(stack, folder, options, tp) for tp in options.rank_counts]
        for suite in names:
            works = _works(suite, spec.vocab_size, options)
            if peers:
                rounds.on_stage(f"{suite}, {model.name}: trying transformers in every dtype")
            variants = [subject.variant(work) for work in works for subject in (*pools, *peers)]
            series = rounds.run(suite, variants, model.name)
            results.series += series
            if peers:  # ours and theirs at the first work
                ours, theirs = (median_of(series, variants[at].name, RATE) for at in (0, len(pools)))
                results.values[f"{suite} {spec.family}"] = ours / theirs
            if suite == "decode" and AIM_TP in options.rank_counts:
                share = median_of(series, _pool_name(AIM_TP, options), EXCHANGE)
                results.values[f"exchange {spec.family}"] = share


def _works(suite: str, vocab_size: int, options: BenchOptions) -> list[Work]:
    """The same ids for everybody. Several requests make half the tokens each: their steps take longer."""

    def prompts(num_prompts: int, num_tokens: int) -> list[list[int]]:
        ids: list[list[int]] = np.random.default_rng(5).integers(0, vocab_size, (num_prompts, num_tokens)).tolist()
        return ids

    if suite == "prompt":
        return [Work(suite, "", prompts(1, options.long_prompt_tokens), 1)]
    works = [Work(suite, "", prompts(1, options.prompt_tokens), options.new_tokens)]
    if options.num_requests > 1:
        label, new_tokens = f", {options.num_requests} requests", max(2, options.new_tokens // 2)
        works.append(Work(suite, label, prompts(options.num_requests, options.prompt_tokens), new_tokens))
    return works


def _pool_name(tp: int, options: BenchOptions) -> str:
    return f"leafsum, tp {tp}, {_threads(options.settings.threads)} a rank"


def _threads(num_threads: int) -> str:
    return f"{num_threads} thread{'s' if num_threads > 1 else ''}"


def _open_pool(stack: ExitStack, folder: Path, options: BenchOptions, tp: int) -> Subject:
    pool = stack.enter_context(WorkerPool(options.pool_settings(folder, tp)))
    measures = {"decode": _decode, "prompt": _prompt}
    return Subject(lambda work: (_pool_name(tp, options), functools.partial(measures[work.suite], pool, work)))


def _prompt(pool: WorkerPool, work: Work) -> dict[str, float]:
    begin_s = time.perf_counter()
    return {RATE: work.num_prompt_tokens / (_run(pool, work).first_s - begin_s)}


def _decode(pool: WorkerPool, work: Work) -> dict[str, float]:
    """The rate after the first tokens, and where the time of these steps goes."""
    for _ in range(ATTEMPTS):
        begun: list[_Spent] = []

        def begin(begun: list[_Spent] = begun) -> None:
            begun.append(_Spent.by_now(pool))

        times = _run(pool, work, begin)
        rate = {RATE: times.tokens_after_first / (times.last_s - times.first_s)}
        (before,) = begun
        after = _Spent.by_now(pool)
        if after.witness.steps > before.witness.steps:
            return rate | _shares(before, after, times.last_s - before.time_s)
    text = f"expected steps to measure after the first of {work.new_tokens} tokens, found none left each time"
    raise LeafsumError(f"{text}; raise --new-tokens")


@dataclass(frozen=True, slots=True)
class _Spent:
    """What a pool and its processes have done by `time_s`, between two steps; CPU time of coordinator and program."""

    witness: Witness
    time_s: float
    coordinator_ns: int
    program_ns: int

    @classmethod
    def by_now(cls, pool: WorkerPool) -> _Spent:
        witness = pool.witness()
        return cls(witness, time.perf_counter(), cpu_ns(pool.coordinator_pid), time.process_time_ns())


def _shares(before: _Spent, after: _Spent, wall_s: float) -> dict[str, float]:
    """CPU time of the steps between the two outside kernels and, at several ranks, the time that these cost. Figures of
    ranks are means of all."""
    done = after.witness.since(before.witness)
    ranks, wall_ns = done.ranks, wall_s * 1e9

    def share(values_ns: Iterable[int]) -> float:
        return 100 * sum(values_ns) / len(ranks) / wall_ns

    outside_ns = [rank.cpu_ns - rank.kernel_cpu_ns for rank in ranks]
    found = {
        RANK_MS: sum(outside_ns) / len(ranks) / done.steps / 1e6,
        RANK_SHARE: share(outside_ns),
        COORDINATOR_MS: (after.coordinator_ns - before.coordinator_ns) / done.steps / 1e6,
        PROGRAM_MS: (after.program_ns - before.program_ns) / done.steps / 1e6,
    }
    if len(ranks) == 1:
        return found
    return found | {
        CALLS: share(rank.wait_ns for rank in ranks),
        EXCHANGE: share(rank.exchange_ns for rank in ranks),
    }


@dataclass(slots=True)
class _Times:
    """When every request had its first token, how many tokens came after that, and when the last one did."""

    first_s: float = 0.0
    last_s: float = 0.0
    tokens_at_first: int = 0
    num_tokens: int = 0

    @property
    def tokens_after_first(self) -> int:
        return self.num_tokens - self.tokens_at_first


def _run(pool: WorkerPool, work: Work, on_first: Callable[[], None] | None = None) -> _Times:
    """Does the work once. Raises LeafsumError where a request failed."""
    times = _Times()

    def on_progress(progress: Progress) -> None:
        if progress.output_tokens <= times.num_tokens:
            return
        times.num_tokens, times.last_s = progress.output_tokens, time.perf_counter()
        prompts_are_done = progress.prompt_tokens_done == work.num_prompt_tokens
        if not times.tokens_at_first and prompts_are_done and times.num_tokens >= len(work.prompts):
            times.tokens_at_first, times.first_s = times.num_tokens, times.last_s
            if on_first is not None:
                on_first()

    sampling = SamplingParams(max_tokens=work.new_tokens, ignore_eos=True)
    for completion in pool.generate(work.prompts, sampling, on_progress=on_progress):
        if completion.error:
            raise LeafsumError(f"a request that is measured failed at tp {pool.settings.tp}: {completion.error}")
    return times


def _has_transformers() -> bool:
    return find_spec("transformers") is not None


def _open_peers(stack: ExitStack, folder: Path, options: BenchOptions) -> list[Subject]:
    """transformers; nobody where it is not wanted or not installed."""
    if not options.with_transformers or not _has_transformers():
        return []
    threads = options.settings.threads
    env = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    arguments = [str(folder), str(threads)]
    helper = stack.enter_context(Helper("transformers", "leafsum.runtime.bench.peer", arguments, env))

    def prepare(work: Work) -> tuple[str, Callable[[], Mapping[str, float]]]:
        question = {"prompts": work.prompts, "new_tokens": work.new_tokens}
        way = helper.ask(question)["way"]
        return f"transformers, {way}, {_threads(threads)}", lambda: _peer_rate(
            helper.ask(question | {"way": way}), work
        )

    return [Subject(prepare)]


def _peer_rate(answer: Mapping[str, float], work: Work) -> dict[str, float]:
    if work.suite == "prompt":
        return {RATE: work.num_prompt_tokens / answer["prompt_s"]}
    return {RATE: len(work.prompts) * (work.new_tokens - 1) / answer["decode_s"]}
