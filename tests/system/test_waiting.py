"""No process spins: CPU time is counted, not wall time."""

import os
import signal
import time

from leafsum.runtime.pool import WorkerPool
from leafsum.runtime.sampling import SamplingParams
from processes import cpu_ns

IDLE_S = 4.0
LATE_S = 2.0


def test_an_idle_pool_uses_under_half_a_percent_of_a_core_in_each_process():
    with WorkerPool(model="tiny", tp=2, threads=1) as pool:
        pool.generate(["warm"], SamplingParams(max_tokens=4))
        pids = [pool.coordinator_pid, *(rank.pid for rank in pool.witness().ranks), os.getpid()]
        before = {pid: cpu_ns(pid) for pid in pids}
        time.sleep(IDLE_S)
        used = {pid: (cpu_ns(pid) - before[pid]) / 1e9 for pid in pids}
    assert all(seconds < 0.005 * IDLE_S for seconds in used.values()), used


def test_a_rank_that_waits_for_a_late_peer_uses_under_one_percent_of_a_core():
    with WorkerPool(model="tiny", tp=2, threads=1, kv_tokens=1024) as pool:
        waiting, late = (rank.pid for rank in pool.witness().ranks)
        used: list[float] = []

        def hold_up_once(progress):
            if progress.output_tokens == 5:
                os.kill(late, signal.SIGSTOP)
                time.sleep(0.3)  # the other rank runs into its next exchange
                before, coordinator_before = cpu_ns(waiting), cpu_ns(pool.coordinator_pid)
                time.sleep(LATE_S)
                used.append((cpu_ns(waiting) - before) / 1e9)
                used.append((cpu_ns(pool.coordinator_pid) - coordinator_before) / 1e9)
                os.kill(late, signal.SIGCONT)

        (held_up,) = pool.generate(["x"], SamplingParams(max_tokens=20, ignore_eos=True), on_progress=hold_up_once)
        assert len(used) == 2
        assert all(seconds < 0.01 * LATE_S for seconds in used), used
        (undisturbed,) = pool.generate(["x"], SamplingParams(max_tokens=20, ignore_eos=True))
        assert held_up == undisturbed
