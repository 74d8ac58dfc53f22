"""The one error tree of leafsum. Every text says what was expected, what was found, where, and what to do.

LeafsumError
├── ConfigError           a setting, flag, variable or argument is wrong (exit code 2)
│   └── PromptError       a prompt or sampling parameter cannot be served; the pool goes on
├── ModelError            a model folder is missing, damaged, or of an unknown family (exit code 2)
├── ProtocolError         a control-plane message is malformed, oversized or unexpected
├── TransportError        a collective between ranks failed: most often a peer is gone
├── QueueFull             the pool holds as many requests as it may; try again when some have ended
├── RequestFailed         one request failed alone (its logits were not finite, or it kills ranks)
├── GangError             what ends a gang; carries the ordered events of the rank it is about
│   ├── RankError         a rank reported an exception; carries rank, step and traceback
│   │   └── RankMismatch  ranks disagree about a step's tokens or residual bits, or about settings at start
│   ├── RankLost          a rank or the coordinator died; carries the exit status
│   └── DeadlineExceeded  a named wait ran past its deadline
├── PoolClosed            the pool was closed while the call was under way, or before it
├── ReceiptMismatch       arms of a receipt differ (exit code 1)
└── OutputError           standard output, or a file asked for, cannot take the result
"""

from __future__ import annotations


class LeafsumError(Exception):
    """Base of every error that leafsum raises on purpose."""


class ConfigError(LeafsumError):
    """A setting, flag, environment variable or argument is wrong."""


class PromptError(ConfigError):
    """A prompt or a sampling parameter cannot be served by this pool; other requests are not touched."""


class ModelError(LeafsumError):
    """A model folder is missing, damaged, incomplete, or of a family that is not supported."""


class ProtocolError(LeafsumError):
    """A control-plane message is malformed, too large, or not expected in this state. `rank`: whose, -1 for others."""

    def __init__(self, message: str, *, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class TransportError(LeafsumError):
    """A collective between ranks failed; the transport is of no further use. Most often a peer is gone."""


class QueueFull(LeafsumError):
    """The pool holds as many requests as `queue_limit` allows; none of the call's was taken."""


class RequestFailed(LeafsumError):
    """One request failed alone; the others go on."""


class GangError(LeafsumError):
    """Base of what ends a gang. `rank` is -1 where it is about several or none, `step` where none was under way.

    `events`: the record of the rank that it is about, one line an event, oldest first.
    """

    def __init__(self, message: str, *, rank: int = -1, step: int = -1, events: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step
        self.events = events


class RankError(GangError):
    """A rank reported an exception. `traceback_text` is its own."""

    def __init__(
        self, message: str, *, rank: int, step: int, traceback_text: str = "", events: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message, rank=rank, step=step, events=events)
        self.traceback_text = traceback_text


class RankMismatch(RankError):
    """Ranks disagree: about a step's tokens or residual bits, or about what they are at start."""


class RankLost(GangError):
    """A process of the gang is gone. `role` names it, `exit_status` is its exit code (negative: signal)."""

    def __init__(
        self,
        message: str,
        *,
        role: str,
        exit_status: int | None,
        rank: int = -1,
        step: int = -1,
        events: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message, rank=rank, step=step, events=events)
        self.role = role
        self.exit_status = exit_status


class DeadlineExceeded(GangError):
    """A named wait ran past its deadline. `what` is the wait, `timeout_s` its length in seconds."""

    def __init__(
        self,
        message: str,
        *,
        what: str,
        timeout_s: float,
        rank: int = -1,
        step: int = -1,
        events: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message, rank=rank, step=step, events=events)
        self.what = what
        self.timeout_s = timeout_s


class PoolClosed(LeafsumError):
    """The pool was closed before or during the call."""


class ReceiptMismatch(LeafsumError):
    """Arms of a receipt that must be equal are not."""


class OutputError(LeafsumError):
    """Standard output, or a file asked for, cannot take the result."""
