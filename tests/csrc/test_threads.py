"""Kernel threads: same bits for any number, several callers at once, asleep when idle, subnormals kept in each."""

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


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = _C.num_threads(), _C.instruction_set(), _C.min_work()
    _C.set_min_work(0)
    yield
    _C.set_num_threads(before[0])
    _C.set_instruction_set(before[1])
    _C.set_min_work(before[2])


@pytest.mark.parametrize("case", CASES)
def test_same_bits(case: str) -> None:
    expected = CASES[case]()
    for num_threads in (2, 3, 7):
        _C.set_num_threads(num_threads)
        assert _C.num_threads() == num_threads
        assert CASES[case]() == expected, num_threads


def test_several_callers_at_once() -> None:
    cases = ["linear-bfloat16", "attention-float16", "tree", "rows"]
    expected = {case: CASES[case]() for case in cases}
    found: dict[int, bytes] = {}
    _C.set_num_threads(3)

    def call(index: int) -> None:
        found[index] = CASES[cases[index % len(cases)]]()

    callers = [threading.Thread(target=call, args=(index,)) for index in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert found == {index: expected[cases[index % len(cases)]] for index in range(8)}


def test_many_small_jobs_in_a_row() -> None:
    """A job ends without the workers that came too late for it, and those find the next one."""
    x, weight = values(1, 3, 40), packed(2, 700, 40, "bfloat16")
    expected = _C.linear(x, weight, "bfloat16", 700, 0, None).tobytes()
    _C.set_num_threads(6)
    for _ in range(3000):
        assert _C.linear(x, weight, "bfloat16", 700, 0, None).tobytes() == expected
    assert _C.subnormals_kept(), "asked of every thread"


def test_small_jobs_wake_nobody() -> None:
    program = """
        import os
        import numpy as np
        from leafsum import _C

        def num_threads_after(x):
            _C.exp(x)
            return len(os.listdir("/proc/self/task"))

        _C.set_num_threads(3)
        before = num_threads_after(np.zeros(10_000, np.float32))
        assert before == len(os.listdir("/proc/self/task")), "10 us of work are not worth a thread"
        assert num_threads_after(np.zeros(1_000_000, np.float32)) == before + 2
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=60)


def test_idle_threads_use_no_cpu() -> None:
    _C.set_num_threads(4)
    _C.exp(np.zeros(100_000, np.float32))
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05


def test_kernels_release_the_interpreter() -> None:
    _C.set_instruction_set("plain")
    # a busy machine may give this thread no time beside one kernel; a kernel that kept the interpreter never would
    assert any(ran_in_the_middle_of_a_kernel() for _ in range(10)), "nobody else ran in the middle of a kernel"


def ran_in_the_middle_of_a_kernel() -> bool:
    x, weight = values(1, 48, 2048), packed(2, 4096, 2048, "bfloat16")
    span_s: list[float] = []

    def compute() -> None:
        span_s.append(time.monotonic())
        _C.linear(x, weight, "bfloat16", 4096, 0, None)
        span_s.append(time.monotonic())

    worker = threading.Thread(target=compute)
    worker.start()
    ticks_s = []
    while worker.is_alive():
        ticks_s.append(time.monotonic())
        time.sleep(0.001)
    begin_s, end_s = span_s
    middle_s = (begin_s + (end_s - begin_s) / 4, end_s - (end_s - begin_s) / 4)
    return any(middle_s[0] < tick_s < middle_s[1] for tick_s in ticks_s)


def test_a_forked_process_computes_with_threads_of_its_own() -> None:
    program = """
        import os
        import numpy as np
        from leafsum import _C

        x = np.linspace(-5, 5, 300_000, dtype=np.float32)
        _C.set_num_threads(3)
        expected = _C.exp(x)
        pid = os.fork()
        if pid == 0:
            os._exit(0 if _C.exp(x).tobytes() == expected.tobytes() and _C.num_threads() == 3 else 1)
        raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=60)


def test_flushed_subnormals_are_seen_in_caller_and_threads() -> None:
    torch = pytest.importorskip("torch", reason="sets the flags")
    assert _C.subnormals_kept()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        assert not _C.subnormals_kept()
        _C.set_num_threads(3)
        _C.exp(np.zeros(100_000, np.float32))  # Threads start now and inherit the flags.
    finally:
        torch.set_flush_denormal(False)
    assert not _C.subnormals_kept()
    _C.set_num_threads(2)
    assert _C.subnormals_kept()
