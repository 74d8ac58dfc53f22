"""CPU time of other processes."""

from __future__ import annotations

import time

SCHEDULED = 2
"""The kind of a process's CPU clock that counts what the scheduler gave it, in nanoseconds (CPUCLOCK_SCHED)."""


def cpu_ns(pid: int) -> int:
    """Of all threads of a process since it began, those that have ended included. Raises OSError where there is none.

    The clock's number is made as clock_getcpuclockid(3) makes it.
    """
    return time.clock_gettime_ns(~pid << 3 | SCHEDULED)
