"""No process spins: CPU time is counted, not wall time."""

import os
import signal
import threading
import time

import pytest
from leafsum.runtime.pool import WorkerPool
from leafsum.runtime.sampling import SamplingParams
from processes import cpu_ns

IDLE_S = 4.0
LATE_S = 2.0


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(model="tiny", tp=2, threads=1, kv_tokens=1024) as pool:
        yield pool


def test_an_idle_pool_uses_under_half_a_percent_of_a_core_in_each_process(pool):
    pool.generate(["warm"], SamplingParams(max_tokens=4))
    pids = [pool.coordinator_pid, *(rank.pid for rank in pool.witness().ranks), os.getpid()]
    before = {pid: cpu_ns(pid) for pid in pids}
    time.sleep(IDLE_S)
    used = {pid: (cpu_ns(pid) - before[pid]) / 1e9 for pid in pids}
    assert all(seconds < 0.005 * IDLE_S for seconds in used.values()), used


def test_ranks_tell_the_cpu_time_that_they_use_and_what_kernels_use_of_it(pool):
    """Of a decode, as the kernel has it; ranks also import and load before, and answer and sleep after."""
    pool.generate(["warm"], SamplingParams(max_tokens=4))
    before, before_ns = pool.witness(), {rank.pid: cpu_ns(rank.pid) for rank in pool.witness().ranks}
    pool.generate(["x"], SamplingParams(max_tokens=100, ignore_eos=True))
    for rank in pool.witness().since(before).ranks:
        used_ns = cpu_ns(rank.pid) - before_ns[rank.pid]
        assert 0.7 * used_ns < rank.cpu_ns < 1.3 * used_ns
        assert 0.01 * rank.cpu_ns < rank.kernel_cpu_ns < 0.9 * rank.cpu_ns, "tiny has small kernels"


def test_a_rank_that_waits_for_a_late_peer_uses_under_one_percent_of_a_core(pool):
    """While no token comes and the request is not done, a step is under way that one rank holds up for the other."""
    sampling = SamplingParams(max_tokens=100, ignore_eos=True)
    waiting, late = (rank.pid for rank in pool.witness().ranks)
    tokens = [0]
    tokens_told: list[int] = []
    used_s: list[float] = []

    def measure() -> None:
        time.sleep(0.5)  # what was under way has come, and the other rank is in its next exchange
        pids = (waiting, pool.coordinator_pid)
        tokens_told.append(tokens[-1])
        before = [cpu_ns(pid) for pid in pids]
        time.sleep(LATE_S)
        used_s.extend((cpu_ns(pid) - then) / 1e9 for pid, then in zip(pids, before, strict=True))
        tokens_told.append(tokens[-1])
        os.kill(late, signal.SIGCONT)

    measuring = threading.Thread(target=measure)

    def hold_up_once(progress):
        tokens.append(progress.output_tokens)
        if progress.output_tokens == 5:
            os.kill(late, signal.SIGSTOP)
            measuring.start()

    (held_up,) = pool.generate(["x"], sampling, on_progress=hold_up_once)
    measuring.join()
    assert tokens_told[0] == tokens_told[1] < 100, "a step ended, or the request: nobody waited"
    assert all(seconds < 0.01 * LATE_S for seconds in used_s), used_s
    (undisturbed,) = pool.generate(["x"], sampling)
    assert held_up == undisturbed
