"""Ctrl-C while a command generates: the first one drains the pool, the second one ends the program as any other."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ...errors import PoolClosed
from .stdio import say

DRAINING = "finishing what has begun and cancelling the rest; Ctrl-C again ends at once"


class FirstInterrupt:
    """`came` says whether there was one while `draining`: the command then ends with exit code 130, its results
    written.
    """

    def __init__(self) -> None:
        self.came = False

    @contextmanager
    def draining(self, drain: Callable[[], None]) -> Iterator[None]:
        """Let the first Ctrl-C call `drain`, and not raise. Only where Python's own handler is in place, which the
        second one gets: a shell's background job ignores Ctrl-C, and a program that runs a command may have its own.
        """
        own = signal.getsignal(signal.SIGINT)
        if own is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_interrupt(_number: int, _frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, own)
            self.came = True
            say(DRAINING)
            with contextlib.suppress(PoolClosed):  # what ends it is told by whoever waits
                drain()

        signal.signal(signal.SIGINT, on_interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, own)
