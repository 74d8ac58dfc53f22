"""The lost gangs of a run, as its pool hears of them: each one's loss, and what came of it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from ..ranks.journal import event_line
from .messages import GangLost, GangRecovered

log = logging.getLogger("leafsum.pool")

NUM_KEPT = 64
"""Lost gangs, the newest."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """One gang that was lost. `number` counts them from 1; `cause` is the error it would have been.

    `rank` is -1 where several or none is meant, `step` -1 where none was under way. The rest is of the gang that took
    its place: ranks, process ids by rank, and the seconds without one. `num_ranks` is 0 while that is under way, and
    stays 0 of one that did not come up.
    """

    number: int
    cause: str
    rank: int
    step: int
    num_ranks: int = 0
    pids: tuple[int, ...] = ()
    seconds: float = 0.0


class Recoveries:
    """Filled by the line's thread, read by any. Each event is a line of the log, at WARNING."""

    def __init__(self, run_id: str) -> None:
        self.allowance_s = 0.0
        """How much longer than else the coordinator may be silent, while it starts a gang."""
        self._run_id = run_id
        self._newest: deque[Recovery] = deque(maxlen=NUM_KEPT)
        self._teller: threading.Thread | None = None

    def take(self, event: GangLost | GangRecovered) -> None:
        if isinstance(event, GangLost):
            self.allowance_s = event.timeout_s
            self._newest.append(Recovery(event.number, event.cause, event.rank, event.step))
            facts: dict[str, Any] = {"number": event.number, "num_open": event.num_open, "cause": event.cause}
            line = event_line(self._run_id, "gang-lost", event.rank, event.step, **facts)
        else:
            self.allowance_s = 0.0
            self._newest[-1] = replace(
                self._newest[-1], num_ranks=event.num_ranks, pids=event.pids, seconds=event.seconds
            )
            pids = ",".join(map(str, event.pids))
            facts = {"number": event.number, "seconds": event.seconds, "tp": event.num_ranks, "pids": pids}
            line = event_line(self._run_id, "gang-recovered", **facts)
        self._tell(line)

    def wait_told(self, timeout_s: float) -> None:
        """Until the log has all events so far, but not for long: its handlers are the program's."""
        if self._teller is not None and self._teller is not threading.current_thread():
            self._teller.join(timeout_s)

    def _tell(self, line: str) -> None:
        """In a thread of its own, after the one before: a handler may block, raise, or call the pool, and the line's
        thread serves every caller.
        """
        self._teller = threading.Thread(target=_log_after, args=(self._teller, line), name="leafsum-event", daemon=True)
        self._teller.start()

    @property
    def newest(self) -> tuple[Recovery, ...]:
        """The newest 64, oldest first."""
        return tuple(self._newest)


def _log_after(before: threading.Thread | None, line: str) -> None:
    if before is not None:
        before.join()
    log.warning("%s", line)
