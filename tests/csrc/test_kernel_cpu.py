"""The CPU time that kernels say they have used: that of all their threads, and no wait."""

import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from csrc.cases import CASES, packed, values
from leafsum import _C

CAP_NS = 500_000
"""The most that one small job counts."""


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = _C.num_threads(), _C.min_work()
    _C.set_num_threads(1)
    yield
    _C.set_num_threads(before[0])
    _C.set_min_work(before[1])


class Heavy:
    """A linear of some tens of milliseconds."""

    def __init__(self) -> None:
        self.x, self.weight = values(1, 128, 2048), packed(2, 4096, 2048, "bfloat16")

    def __call__(self) -> None:
        _C.linear(self.x, self.weight, "bfloat16", 4096, 0, None)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_every_kernel_is_counted(case: str, num_threads: int) -> None:
    _C.set_min_work(0)
    _C.set_num_threads(num_threads)
    before_ns = _C.kernel_cpu_ns()
    CASES[case]()
    assert _C.kernel_cpu_ns() > before_ns


def test_a_heavy_call_counts_what_the_process_uses() -> None:
    heavy = Heavy()
    heavy()
    used_ns, counted_ns = time.process_time_ns(), _C.kernel_cpu_ns()
    for _ in range(3):
        heavy()
    used_ns, counted_ns = time.process_time_ns() - used_ns, _C.kernel_cpu_ns() - counted_ns
    assert 0.7 * used_ns < counted_ns < used_ns + CAP_NS


def test_all_threads_are_counted() -> None:
    heavy = Heavy()
    _C.set_num_threads(3)
    heavy()
    used_ns, of_caller_ns, counted_ns = time.process_time_ns(), time.thread_time_ns(), _C.kernel_cpu_ns()
    deadline_s = time.monotonic() + 60
    while True:
        heavy()
        whole_ns = time.process_time_ns() - used_ns
        caller_ns = time.thread_time_ns() - of_caller_ns
        if caller_ns < 0.7 * whole_ns:
            break
        assert time.monotonic() < deadline_s, "the other threads got nothing to do"
    assert 0.8 * whole_ns < _C.kernel_cpu_ns() - counted_ns < whole_ns + CAP_NS


def test_waiting_for_other_ranks_is_not_counted() -> None:
    words = np.zeros((3, 16), np.int32)
    used_ns, counted_ns = time.process_time_ns(), _C.kernel_cpu_ns()
    rank = threading.Thread(target=_C.meeting_pass, args=(words, 0, 0, time.monotonic() + 60))
    rank.start()
    time.sleep(0.5)
    _C.meeting_arrive(words, 1)
    rank.join()
    assert _C.kernel_cpu_ns() == counted_ns
    assert time.process_time_ns() - used_ns < 0.25e9


def test_small_jobs_count_hardly_any_of_the_time_without_a_core() -> None:
    """They are timed by the wall. The child is nearly always in one; each time it is stopped, one holds 0.2 s."""
    child = """
        import resource, sys, time
        import numpy as np
        from leafsum import _C

        x = np.zeros(15_000, np.float32)
        _C.set_num_threads(1)
        print(flush=True)
        end_s = time.monotonic() + 3
        while time.monotonic() < end_s:
            _C.exp(x)
        found = resource.getrusage(resource.RUSAGE_SELF)
        print(time.process_time_ns(), _C.kernel_cpu_ns(), found.ru_nivcsw + found.ru_nvcsw)
    """
    num_stops = 8
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(child)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for _ in range(num_stops):
            time.sleep(0.1)
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.2)
            process.send_signal(signal.SIGCONT)
        used_ns, counted_ns, num_switches = map(int, process.stdout.readline().split())
    assert 0.1 * used_ns < counted_ns < used_ns + CAP_NS * (num_switches + num_stops)


def test_a_forked_process_begins_at_nothing() -> None:
    program = """
        import os, time
        import numpy as np
        from leafsum import _C

        x = np.zeros(1_000_000, np.float32)
        for _ in range(20):
            _C.exp(x)
        pid = os.fork()
        if pid == 0:
            begun_ns = _C.kernel_cpu_ns()
            _C.exp(x)
            os._exit(0 if begun_ns == 0 < _C.kernel_cpu_ns() <= time.process_time_ns() else 1)
        raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=60)
