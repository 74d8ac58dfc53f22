"""How an error of the gang reaches the program: as a message that makes the pool raise the same error."""

from __future__ import annotations

import traceback
from typing import Any

from msgspec.structs import replace

from .. import errors
from ..errors import DeadlineExceeded, GangError, LeafsumError, ProtocolError, RankError, RankLost
from .messages import Fatal


def fatal_of(error: Exception) -> Fatal:
    """Whatever is no LeafsumError is a defect of the coordinator: it travels as one, with its traceback."""
    if not isinstance(error, LeafsumError):
        text = f"the coordinator failed: {type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        return Fatal(kind=LeafsumError.__name__, text=text, traceback_text=trace)
    fatal = Fatal(kind=type(error).__name__, text=str(error))
    if isinstance(error, ProtocolError):
        return replace(fatal, rank=error.rank)
    if not isinstance(error, GangError):
        return fatal
    fatal = replace(fatal, rank=error.rank, step=error.step, events=error.events)
    if isinstance(error, RankError):
        return replace(fatal, traceback_text=error.traceback_text)
    if isinstance(error, RankLost):
        return replace(fatal, role=error.role, exit_status=error.exit_status)
    if isinstance(error, DeadlineExceeded):
        return replace(fatal, what=error.what, timeout_s=error.timeout_s)
    return fatal


def error_of(fatal: Fatal) -> LeafsumError:
    """The error that a Fatal stands for, with the fields its class has. The inverse of fatal_of."""
    named = getattr(errors, fatal.kind, None)
    kind = named if isinstance(named, type) and issubclass(named, LeafsumError) else LeafsumError
    at: dict[str, Any] = {"rank": fatal.rank, "step": fatal.step, "events": fatal.events}
    if issubclass(kind, RankError):
        return kind(fatal.text, **at, traceback_text=fatal.traceback_text)
    if issubclass(kind, RankLost):
        return kind(fatal.text, **at, role=fatal.role, exit_status=fatal.exit_status)
    if issubclass(kind, DeadlineExceeded):
        return kind(fatal.text, **at, what=fatal.what, timeout_s=fatal.timeout_s)
    if issubclass(kind, GangError):
        return kind(fatal.text, **at)
    if issubclass(kind, ProtocolError):
        return kind(fatal.text, rank=fatal.rank)
    error = kind(fatal.text)
    if fatal.traceback_text:
        error.add_note(fatal.traceback_text)
    return error
