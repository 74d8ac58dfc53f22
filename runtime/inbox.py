"""What one caller is told by the line, in order: taken out by a thread that waits, or by a task of an event loop."""

from __future__ import annotations

import contextlib
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from .messages import Advance, Answer, Fatal, Finished, Started

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future

Word: TypeAlias = Started | Advance | Finished | Answer | Fatal | None
"""A Fatal is the end of the line; None: the inbox's owner has no more use for it."""


class Inbox:
    """Filled by any thread, read by one caller at a time. No word is lost to a caller that is interrupted: it is in
    the queue until the instruction that takes it.
    """

    def __init__(self) -> None:
        self._words: SimpleQueue[Word] = SimpleQueue()
        self._waiting: tuple[AbstractEventLoop, Future[None]] | None = None
        """The task that waits, if one does: its loop, and what ends its wait."""

    def put(self, word: Word) -> None:
        """Never blocks and takes no lock that a signal handler could want again."""
        self._words.put(word)
        waiting = self._waiting  # set before its task looks for a word: one of the two sees the other
        if waiting is not None:
            loop, arrival = waiting
            with contextlib.suppress(RuntimeError):  # the loop was closed, and its task with it
                loop.call_soon_threadsafe(_settle, arrival)

    def get(self, timeout_s: float) -> Word:
        """Wait in this thread. Raises queue.Empty where no word came in time."""
        return self._words.get(timeout=timeout_s)

    async def aget(self, timeout_s: float) -> Word:
        """Wait in this task; threads wake it through its loop. Raises queue.Empty where no word came in time."""
        from asyncio import get_running_loop, sleep  # 50 ms that a program without a loop need not spend

        if not self.empty():
            await sleep(0)  # the words of a long silence must not keep other tasks waiting
            return self._words.get_nowait()
        loop = get_running_loop()
        arrival = loop.create_future()
        self._waiting = loop, arrival
        timer = loop.call_later(timeout_s, _settle, arrival)
        try:
            if self.empty():
                await arrival
        finally:
            self._waiting = None
            timer.cancel()
        return self._words.get_nowait()

    def empty(self) -> bool:
        return self._words.empty()


def _settle(arrival: Future[None]) -> None:
    """Also the second word of a wait, and the timer of one that has ended, come here."""
    if not arrival.done():
        arrival.set_result(None)
