"""What the processes of a run write to standard error: one line an event, `time level run=RUN ... event=NAME ...`.

A line is one write, so that lines of several processes never mix, and no write can hold a process up or end it: a line
that standard error does not take at once is dropped and counted, and the next one that it takes says how many were.
"""

from __future__ import annotations

import logging
import os
import stat
from datetime import datetime

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


def open_standard_error() -> int:
    """The descriptor that lines are written to.

    A pipe is opened anew: its reader may have stopped reading, and to make the inherited one non-blocking would make
    it so for the program too. A closed descriptor is filled, so that no socket gets its number and what libraries say.
    """
    try:
        kind = os.fstat(STANDARD_ERROR).st_mode
    except OSError:
        null_fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        if null_fd != STANDARD_ERROR:
            os.dup2(null_fd, STANDARD_ERROR)
            os.close(null_fd)
        return STANDARD_ERROR
    if stat.S_ISFIFO(kind):
        try:
            return os.open(f"/proc/self/fd/{STANDARD_ERROR}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # another user's pipe, or one without a reader
            return STANDARD_ERROR
    return STANDARD_ERROR


class LineHandler(logging.Handler):
    def __init__(self, fd: int) -> None:
        super().__init__()
        self.fd = fd
        self.num_lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(self.format(record))
        except Exception:
            self.handleError(record)

    def _write(self, line: str) -> None:
        lost = f"{line} lines_lost={self.num_lost}" if self.num_lost else line
        data = lost.encode(errors="backslashreplace")[: MAX_LINE_BYTES - 1] + b"\n"
        try:
            os.write(self.fd, data)
        except OSError:
            self.num_lost += 1
        else:
            self.num_lost = 0


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
