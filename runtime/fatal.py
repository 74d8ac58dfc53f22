"""How an error of the gang reaches the program: as a message that makes the pool raise the same error."""

from __future__ import annotations

import traceback

from msgspec.structs import replace

from .. import errors
from ..errors import DeadlineExceeded, GangError, LeafsumError, RankError, RankLost
from .messages import Fatal


def fatal_of(error: Exception) -> Fatal:
    """Whatever is no LeafsumError is a defect of the coordinator: it travels as one, with its traceback."""
    if not isinstance(error, LeafsumError):
        text = f"the coordinator failed: {type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        return Fatal(kind=LeafsumError.__name__, text=text, traceback_text=trace)
    fatal = Fatal(
        kind=type(error).__name__, text=str(error), events=error.events if isinstance(error, GangError) else ()
    )
    if isinstance(error, RankError):
        return replace(fatal, rank=error.rank, step=error.step, traceback_text=error.traceback_text)
    if isinstance(error, RankLost):
        return replace(fatal, role=error.role, exit_status=error.exit_status)
    if isinstance(error, DeadlineExceeded):
        return replace(fatal, what=error.what, timeout_s=error.timeout_s)
    return fatal


def error_of(fatal: Fatal) -> LeafsumError:
    """The error that a Fatal stands for, with the fields its class has. The inverse of fatal_of."""
    named = getattr(errors, fatal.kind, None)
    kind = named if isinstance(named, type) and issubclass(named, LeafsumError) else LeafsumError
    if issubclass(kind, RankError):
        at = {"rank": fatal.rank, "step": fatal.step}
        return kind(fatal.text, **at, traceback_text=fatal.traceback_text, events=fatal.events)
    if issubclass(kind, RankLost):
        return kind(fatal.text, role=fatal.role, exit_status=fatal.exit_status, events=fatal.events)
    if issubclass(kind, DeadlineExceeded):
        return kind(fatal.text, what=fatal.what, timeout_s=fatal.timeout_s, events=fatal.events)
    error = kind(fatal.text)
    if fatal.traceback_text:
        error.add_note(fatal.traceback_text)
    return error
