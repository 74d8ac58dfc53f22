"""What the processes of a run write to standard error: one line an event, `time level run=RUN ... event=NAME ...`.

A line is one write, so that lines of several processes never mix, and no write can hold a process up or end it: a line
that standard error does not take at once is dropped and counted, and the next one that it takes says how many were.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import sys
from collections.abc import Callable
from datetime import datetime
from functools import partial

from .journal import quoted

STANDARD_ERROR = 2

MAX_LINE_BYTES = 4096
"""PIPE_BUF: up to here a pipe takes a line whole or not at all."""


def configure_logs(level: str, run_id: str, rank: int | None = None) -> None:
    """Send this process's log records, and Python's warnings, to standard error. Call it first, before any socket.

    `level`: as the setting `log_level`. `run_id` and `rank` name the process in what no Journal says.
    """
    where = f"run={run_id}" + (f" rank={rank}" if rank is not None else "")
    handler = LineHandler(open_standard_error())
    handler.setFormatter(LineFormatter(where))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # a wrong log call loses its line: it must not end a rank
    sys.excepthook = lambda _kind, error, _trace: logging.getLogger("leafsum").critical("uncaught", exc_info=error)


def open_standard_error() -> int:
    """The descriptor that lines are written to.

    A pipe or a terminal is opened anew: its reader may have stopped reading, and to make the inherited one non-blocking
    would make it so for the program too. A closed descriptor is filled, so that no socket gets its number, and with it
    what libraries say.
    """
    try:
        kind = os.fstat(STANDARD_ERROR).st_mode
    except OSError:
        null_fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        if null_fd != STANDARD_ERROR:
            os.dup2(null_fd, STANDARD_ERROR)
            os.close(null_fd)
        return STANDARD_ERROR
    if stat.S_ISFIFO(kind) or stat.S_ISCHR(kind):
        try:
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            return os.open(f"/proc/self/fd/{STANDARD_ERROR}", flags)
        except OSError:  # another user's, or a pipe without a reader
            return STANDARD_ERROR
    return STANDARD_ERROR


class LineHandler(logging.Handler):
    def __init__(self, fd: int) -> None:
        super().__init__()
        self.num_lost = 0
        self._send: Callable[[bytes], int] = partial(os.write, fd)
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):  # as the journal of a service manager is; it cannot be opened anew
                self._send = partial(_send_now, socket.socket(fileno=os.dup(fd)))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(self.format(record))
        except Exception:
            self.handleError(record)

    def _write(self, line: str) -> None:
        lost = f" lines_lost={self.num_lost}" if self.num_lost else ""
        try:
            self._send(_cut(line, MAX_LINE_BYTES - len(lost) - 1) + lost.encode() + b"\n")
        except OSError:
            self.num_lost += 1
        else:
            self.num_lost = 0


def _send_now(end: socket.socket, data: bytes) -> int:
    return end.send(data, socket.MSG_DONTWAIT)


def _cut(line: str, num_bytes: int) -> bytes:
    """At most as many bytes of the line, a quoted word that does not end among them with its end."""
    data = line.encode(errors="backslashreplace")
    if len(data) <= num_bytes:
        return data
    data = data[: num_bytes - 1].rstrip(b"\\")
    is_open = (data.count(b'"') - data.count(b'\\"')) % 2
    return data + b'"' * is_open


class LineFormatter(logging.Formatter):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if not text.startswith("run="):  # no Journal's
            text = f"{self.where} event=log logger={record.name} text={quoted(text)}"
        if record.exc_info:
            text += f" traceback={quoted(self.formatException(record.exc_info))}"
        time = datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
        return f"{time} {record.levelname.lower()} {text}"
