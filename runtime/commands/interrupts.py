"""Ctrl-C while a command generates: the first one drains the pool, the second one ends the program as any other."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ...errors import PoolClosed
from .stdio import say

ONE_PRESS_S = 0.3
"""One Ctrl-C may come several times: of the terminal, and of a program around this one that passes it on."""

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

        first_s = -math.inf

        def on_interrupt(number: int, frame: FrameType | None) -> None:
            nonlocal first_s
            if self.came:
                if time.monotonic() > first_s + ONE_PRESS_S:
                    own(number, frame)
                return
            self.came, first_s = True, time.monotonic()
            say(DRAINING)
            with contextlib.suppress(PoolClosed):  # what ends it is told by whoever waits
                drain()

        signal.signal(signal.SIGINT, on_interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, own)
