"""Whether a lost gang is started again, how large, and whose doing the loss was.

Every bit of a row follows from the row's own tokens (docs/numerics.md, the row law): a new gang that is fed the tokens
so far comes to the same keys, states and tokens, so that no open stream need hear of more than a pause.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from ..errors import (
    ConfigError,
    DeadlineExceeded,
    GangError,
    LeafsumError,
    ModelError,
    ProtocolError,
    RankLost,
    RankMismatch,
)
from .settings import Settings

INSIDE_SIGNALS = (
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGABRT,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGTRAP,
    signal.SIGSYS,
)
"""These come of what a process did. Others it gets of somebody else, or of a limit on all that it has done."""


class Restarts:
    """How often a gang may be started again: `recover_limit` times within `recover_window_s`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._starts_s: deque[float] = deque(maxlen=settings.recover_limit)

    def sizes(self) -> Iterator[int]:
        """Rank counts to try one after the other, until one comes up; ends where no further start is allowed.

        "shrink" tries fewer and fewer ranks, and all of that counts as one start. The limit is also one recovery's: a
        start that ends by its deadline takes longer than its share of the window.
        """
        num_ranks = self._settings.tp
        as_many_or_fewer = range(num_ranks, 0, -1) if self._settings.recover == "shrink" else (num_ranks,)
        for _ in range(self._settings.recover_limit):
            if self._settings.recover == "never" or not self._take():
                return
            yield from as_many_or_fewer

    def forgive(self, num_starts: int) -> None:
        """What was lost to a request that is found and given up is no sign of a machine that fails."""
        for _ in range(min(num_starts, len(self._starts_s))):
            self._starts_s.pop()

    def why_no_more(self) -> str:
        """What an error says of the end of all attempts."""
        if self._settings.recover == "never":
            return ""
        return (
            f". The gang was not started again: {len(self._starts_s)} of at most {self._settings.recover_limit} starts "
            f"(--recover-limit) were made within {self._settings.recover_window_s:g} s (--recover-window-s)"
        )

    def _take(self) -> bool:
        now_s = time.monotonic()
        while self._starts_s and self._starts_s[0] < now_s - self._settings.recover_window_s:
            self._starts_s.popleft()
        if len(self._starts_s) == self._settings.recover_limit:
            return False
        self._starts_s.append(now_s)
        return True


def can_be_recovered(error: LeafsumError) -> bool:
    """Whether another gang may do better: not where ranks disagree, nor where a setting or the model is wrong."""
    return isinstance(error, GangError | ProtocolError) and not isinstance(error, RankMismatch)


def can_be_tried_again(error: LeafsumError, how: str) -> bool:
    """Whether a gang that did not come up may be tried again. With fewer ranks, each needs more memory and other
    files; with as many, what is wrong with a setting or the model stays wrong.
    """
    if isinstance(error, RankMismatch):
        return False
    return how == "shrink" or not isinstance(error, ConfigError | ModelError)


def is_from_outside(error: LeafsumError, *, has_stopped_rank: bool, num_oom_kills: int) -> bool:
    """Whether somebody else ended or stopped a rank, so that no request can be the cause.

    `num_oom_kills`: by the kernel for want of memory, since the gang was started. It kills as a person does, and a
    request may well be the cause.
    """
    if isinstance(error, RankLost):
        status = error.exit_status or 0
        was_killed = status < 0 and -status not in INSIDE_SIGNALS
        return was_killed and not (error.exit_status == -signal.SIGKILL and num_oom_kills)
    return isinstance(error, DeadlineExceeded) and has_stopped_rank


def count_oom_kills() -> int:
    """Processes that the kernel has killed for want of memory since the machine started; 0 where it does not say.

    proc(5), /proc/vmstat, oom_kill (since Linux 4.13). Containers see the host's.
    """
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
