"""Thread counts and instruction sets: every way in which this machine can run a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from leafsum import _C

THREAD_COUNTS = (1, 2, 3)


@contextmanager
def machine(instruction_set: str, num_threads: int) -> Iterator[None]:
    """Kernels run so inside the block, small jobs on all threads too; the settings before come back after it."""
    before = _C.instruction_set(), _C.num_threads(), _C.min_work()
    _C.set_instruction_set(instruction_set)
    _C.set_num_threads(num_threads)
    _C.set_min_work(0)
    try:
        yield
    finally:
        _C.set_instruction_set(before[0])
        _C.set_num_threads(before[1])
        _C.set_min_work(before[2])


def machines() -> Iterator[str]:
    """Runs a loop's body once on every machine; yields its name."""
    for instruction_set in _C.instruction_sets():
        for num_threads in THREAD_COUNTS:
            with machine(instruction_set, num_threads):
                yield f"{instruction_set}, {num_threads} threads"
