"""Where the ranks of one host wait for one another: words in memory that they share, and a pidfd of every peer."""

from __future__ import annotations

import os
import select
import time
import weakref

import numpy as np
from numpy.typing import NDArray

from .. import _C

I32 = NDArray[np.int32]

WORDS_PER_ROW = 16
"""A row is a cache line. Row 0 and the first word of the others are written by csrc/cpu/bind_meeting.cpp alone."""

_ARRIVALS, _PID, _END, _NOTE = range(4)  # words of a rank's row

_GENERATIONS = 1 << 31  # they are counted modulo this
_AWAY_S = 1.0  # a sleep that ends this much later than asked for says nothing of the peers
_LOOK_S = 1.0  # how long to sleep between two looks at the peers: a death is noticed within it

CLOSED, FAILED = 1, 2
_ENDS = {CLOSED: "has closed its transport", FAILED: "has given up"}


def num_words(num_ranks: int) -> int:
    """int32 words of a meeting of `num_ranks`."""
    return (1 + num_ranks) * WORDS_PER_ROW


class Peers:
    """A pidfd of every other process of the gang. A rank that is a thread of this process needs none."""

    def __init__(self) -> None:
        self._pidfds: dict[int, int] = {}  # rank -> descriptor
        self._gone: set[int] = set()
        self._poll = select.poll()
        weakref.finalize(self, _close_all, self._pidfds)

    def watch(self, pids: list[int]) -> None:
        """pids by rank."""
        for rank, pid in enumerate(pids):
            if pid == os.getpid():
                continue
            try:
                self._pidfds[rank] = os.pidfd_open(pid)
            except ProcessLookupError:
                self._gone.add(rank)
            else:
                self._poll.register(self._pidfds[rank], select.POLLIN)

    def ended(self) -> set[int]:
        """Ranks whose process is no more."""
        ready = [fd for fd, _ in self._poll.poll(0)]
        return self._gone.union(rank for rank, fd in self._pidfds.items() if fd in ready)


def _close_all(pidfds: dict[int, int]) -> None:
    for fd in pidfds.values():
        os.close(fd)


class Meeting:
    """One rank's seat at a barrier that all ranks pass again and again.

    `words` int32 [num_words], shared, zero before the first rank sits down. `generation` counts the barriers passed.
    """

    def __init__(self, words: I32, rank: int, peers: Peers) -> None:
        self._words = words.reshape(-1, WORDS_PER_ROW)
        self._rows = self._words[1:]
        self._peers = peers
        self.rank = rank
        self.generation = 0
        taken_by = int(self._rows[rank, _PID])
        if taken_by:
            raise ConnectionError(
                f"rank {rank} has come to this meeting already, as pid {taken_by}: every rank comes once, and a "
                "store_path serves one meeting"
            )
        self._owner_pid = self._rows[rank, _PID] = os.getpid()

    @property
    def pids(self) -> list[int]:
        """By rank; 0 where a rank has not come yet."""
        return [int(pid) for pid in self._rows[:, _PID]]

    @property
    def notes(self) -> I32:
        """int32 [num_ranks], zero at first: one word of each rank for the others."""
        return self._rows[:, _NOTE]

    def refuse_a_fork(self) -> None:
        """Raises ConnectionError in a forked copy of this rank's process: the seat is not its own."""
        if os.getpid() != self._owner_pid:
            raise ConnectionError(f"this process is a forked copy of rank {self.rank} (pid {self._owner_pid})")

    def wait_for_all(self, deadline_s: float) -> None:
        """Arrive, and return when all have arrived. Ranks sleep meanwhile.

        Raises TimeoutError at `deadline_s` of time.monotonic(), ConnectionError where a rank is gone or has left. The
        arrival counts nonetheless: this rank must not arrive again.
        """
        look_at_s = min(deadline_s, time.monotonic() + _LOOK_S)
        seen = _C.meeting_pass(self._words, self.rank, self.generation, look_at_s)
        while seen != _C.MEETING_MET:
            if (away_s := time.monotonic() - look_at_s) > _AWAY_S:  # this process was stopped, and maybe all of them
                deadline_s += away_s + _LOOK_S  # and a look more
            self._refuse_to_wait(seen == _C.MEETING_BROKEN_OFF, deadline_s)
            look_at_s = min(deadline_s, time.monotonic() + _LOOK_S)
            seen = _C.meeting_wait(self._words, self.generation, look_at_s)
        self.generation = (self.generation + 1) % _GENERATIONS

    def leave(self, end: int) -> None:
        """End the meeting for all, as CLOSED or FAILED: who waits, or comes later, gets an error. Never waits."""
        if os.getpid() != self._owner_pid:
            return
        if not self._rows[self.rank, _END]:
            self._rows[self.rank, _END] = end
        _C.meeting_break_off(self._words)

    def _refuse_to_wait(self, is_broken_off: bool, deadline_s: float) -> None:
        """Raise if it is of no use, or too late, to go on waiting."""
        ended = self._peers.ended()
        is_late = time.monotonic() >= deadline_s
        if not (ended or is_late or is_broken_off):
            return
        # After the look at the processes: what one did before its end is then seen. One that had arrived is not missed.
        missing = [rank for rank in range(len(self._rows)) if not self._has_arrived(rank)]
        lost = [f"{self._name(rank)} has ended" for rank in missing if rank in ended]
        if lost or is_broken_off:  # a death first: who has given up may have done so for that
            raise ConnectionError(f"{', '.join(lost or self._ends())}; look for its error first")
        if missing and is_late:
            raise TimeoutError(f"not every rank took part: {', '.join(map(self._name, missing))} did not come")

    def _has_arrived(self, rank: int) -> bool:
        return (int(self._rows[rank, _ARRIVALS]) - self.generation - 1) % _GENERATIONS == 0

    def _ends(self) -> list[str]:
        return [f"{self._name(rank)} {_ENDS[int(end)]}" for rank, end in enumerate(self._rows[:, _END]) if end]

    def _name(self, rank: int) -> str:
        pid = int(self._rows[rank, _PID])
        return f"rank {rank} (pid {pid})" if pid else f"rank {rank}"
