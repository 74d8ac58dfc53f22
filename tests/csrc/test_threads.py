"""Kernel threads: same bits for any number, several callers at once, asleep when idle, subnormals kept in each."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from csrc.cases import CASES, packed, values
from leafsum import _C


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = _C.num_threads(), _C.instruction_set()
    yield
    _C.set_num_threads(before[0])
    _C.set_instruction_set(before[1])


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


def test_idle_threads_use_no_cpu() -> None:
    _C.set_num_threads(4)
    _C.exp(np.zeros(100_000, np.float32))
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05


def test_kernels_release_the_interpreter() -> None:
    _C.set_instruction_set("plain")
    x, weight = values(1, 48, 2048), packed(2, 1024, 2048, "bfloat16")
    worker = threading.Thread(target=_C.linear, args=(x, weight, "bfloat16", 1024, 0, None))
    worker.start()
    time.sleep(0.01)  # Comes back only after the kernel if that held the interpreter.
    still_running = worker.is_alive()
    worker.join()
    assert still_running


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
