"""CPU time as the benchmark counts it: of waits, and of a rank outside its kernels."""

import contextlib
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace

import pytest
from leafsum import WorkerPool
from leafsum.errors import LeafsumError
from leafsum.ranks.tiny import ensure_tiny
from leafsum.runtime.bench import generation, waiter, waiting
from leafsum.runtime.bench.aims import AIMS
from leafsum.runtime.bench.cpu import cpu_ns
from leafsum.runtime.settings import Settings
from leafsum.runtime.witness import RankWitness, Witness
from runtime.bench_runs import OF_CPU, OF_RANKS, measure, small_options


@pytest.fixture
def options():
    return small_options()


def test_waiting(options):
    results = measure(waiting, ["waiting"], replace(options, rank_counts=(2,)))
    assert [(series.variant, series.figure) for series in results.series] == [
        (name, f"ms/s of CPU, {role}")
        for name in ("idle pool, tp 2", "last rank late, tp 2")
        for role in ("program", "coordinator", "rank")
    ]
    assert set(results.values) == {"idle", "late"}
    assert max(results.values.values()) < 200, "somebody spins"


class UsedBy:
    """In place of a program with a pool: ms/s of its processes, idle and with a late rank, by the number of ranks."""

    def __init__(self, _role, _module, arguments):
        self.tp = Settings.from_dict(json.loads(arguments[0])).tp

    def ask(self, question):
        late_rank = question["late_rank"]
        assert late_rank in (None, self.tp - 1)
        ranks = {f"rank {rank}": self.tp + rank + 0.5 * (late_rank is not None) for rank in range(self.tp)}
        ranks.pop(f"rank {late_rank}", None)
        return {"program": 7.0 * (late_rank is not None), "coordinator": 0.0} | ranks


@pytest.mark.parametrize(("rank_counts", "values"), [((1,), {"idle": 1}), ((1, 3), {"idle": 5, "late": 4.5})])
def test_of_waits_the_process_that_used_most_counts(rank_counts, values, options, monkeypatch):
    monkeypatch.setattr(waiting, "Helper", lambda *words: contextlib.nullcontext(UsedBy(*words)))
    assert measure(waiting, ["waiting"], replace(options, rank_counts=rank_counts)).values == values
    assert set(values) <= {aim.key for aim in AIMS}


def test_nobody_waits_for_a_rank_whose_request_has_ended(monkeypatch):
    monkeypatch.setattr(waiter, "MOST_TOKENS", 2)
    with WorkerPool(model="tiny", tp=2, threads=1, kv_tokens=1024, recover="never") as pool:
        asked = waiter.Waiter(pool, 0.1)
        monkeypatch.setattr(waiter.os, "kill", lambda *_: None)  # the rank is in time
        with pytest.raises(LeafsumError, match="expected a request of 2 tokens to be held up, found that it has ended"):
            asked.answer(1)
        assert asked.answer(None).keys() == {"program", "coordinator", "rank 0", "rank 1"}


def test_the_cpu_time_of_another_process_is_counted():
    code = "import time, sys\nwhile time.process_time() < 0.3: pass\nprint(flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert 0.3e9 <= cpu_ns(process.pid) < 1e9
        assert cpu_ns(process.pid) >= 0.3e9
        process.kill()
    with pytest.raises(OSError, match="Invalid argument"):
        cpu_ns(process.pid)


def test_the_cpu_time_of_a_rank_is_what_its_kernels_leave_and_no_wait():
    """Two ranks of one second: 0.3 and 0.1 s of CPU outside kernels in ten steps of 0.1 s, and waits of any length."""

    def spent(steps, coordinator_s, program_s, *ranks):
        found = [
            RankWitness(
                rank, 7, 0, 0, 0, {}, "nodes", "shared", 1, False, cpu_ns=int(cpu_s * 1e9),
                kernel_cpu_ns=int(kernel_s * 1e9), wait_ns=int(4e8 * steps / 10),
            )
            for rank, (cpu_s, kernel_s) in enumerate(ranks)
        ]  # fmt: skip
        return generation._Spent(
            Witness(steps, 1, 1, tuple(found)), 0.0, int(coordinator_s * 1e9), int(program_s * 1e9)
        )

    before = spent(0, 5.0, 6.0, (3.0, 1.0), (2.0, 1.0))
    after = spent(10, 5.02, 6.01, (3.8, 1.5), (2.5, 1.4))
    assert generation._shares(before, after, 1.0) == pytest.approx(
        dict(zip((*OF_CPU, *OF_RANKS), (20.0, 20.0, 2.0, 1.0, 40.0, 0.0), strict=True))
    )


def test_no_pool_that_is_measured_recovers(options, monkeypatch):
    """Also where the environment says so: a lost gang is to fail its suite."""
    monkeypatch.setenv("LEAFSUM_RECOVER", "same")
    opened = []

    def open_pool(settings):
        opened.append(settings)
        return contextlib.nullcontext()

    monkeypatch.setattr(generation, "WorkerPool", open_pool)
    monkeypatch.setattr(waiting, "Helper", lambda *words: open_pool(Settings.from_dict(json.loads(words[-1][0]))))
    options = replace(options, settings=Settings.resolve({}, os.environ))
    assert options.settings.recover == "same"
    with ExitStack() as stack:
        generation._open_pool(stack, ensure_tiny(), options, 2)
        waiting._open_waiter(stack, options, 2)
    assert [(settings.tp, settings.recover) for settings in opened] == [(2, "never"), (2, "never")]
