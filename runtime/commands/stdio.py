"""Standard output as a result: a full disk, a closed descriptor or a reader that has gone is an error of the run.

Standard error is for a person: what cannot be written there is lost.
"""

from __future__ import annotations

import logging
import os
import select
import sys

from ...errors import OutputError

PIPE_BYTES = 4096
"""PIPE_BUF: as many a pipe takes whole, if it takes any."""


def hold_standard_streams() -> None:
    """Put /dev/null under standard streams that were closed before the start.

    Otherwise the next socket or pipe would get their descriptor, and somebody's print would write into it.
    """
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= 2:
        fd = os.open(os.devnull, os.O_RDWR)
    os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            # A model's text is any text; the locale must not decide whether it can be printed.
            reconfigure(encoding="utf-8", errors="backslashreplace")


def require_output() -> None:
    """OutputError at once, before anything slow, when standard output was closed."""
    if sys.stdout is None:
        raise OutputError("standard output is closed: expected somewhere to write the result, such as > FILE")


def write_line(text: str) -> None:
    """One line to standard output. BrokenPipeError when the reader has gone, OutputError for whatever else fails."""
    write(text + "\n")


def write(text: str) -> None:
    """As write_line, without the line's end."""
    require_output()
    try:
        sys.stdout.write(text)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _refused(error) from error


def flush_output() -> None:
    """Buffered text reaches the file here or not at all: without this, a full disk would go unnoticed."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _refused(error) from error


def discard_output() -> None:
    """Point descriptor 1 at /dev/null, so that the interpreter's own flush at exit has nothing left to fail at."""
    fd = os.open(os.devnull, os.O_WRONLY)
    os.dup2(fd, 1)
    os.close(fd)


def on_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def printable(text: str) -> str:
    """For a terminal: a model's text may hold control characters, and a terminal would obey them."""
    return "".join(c if c in "\n\t" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def say(text: str) -> None:
    """One paragraph to standard error. Also for signal handlers."""
    tell(f"leafsum: {text}\n")


def tell(text: str) -> None:
    """To standard error. A text may quote a model's file or template: no terminal is to obey what stands there."""
    data = printable(text).encode(errors="backslashreplace")
    try:
        while data and takes_now(2):
            data = data[os.write(2, data[:PIPE_BYTES]) :]
    except OSError:
        return  # nobody listens there; the exit code still tells


def takes_now(fd: int) -> bool:
    """Whether a descriptor takes PIPE_BYTES within a second: a pipe that nobody reads, or a terminal after Ctrl-S, may
    never do so, and must not hold the program up.
    """
    ready = select.poll()
    ready.register(fd, select.POLLOUT)
    return bool(ready.poll(1000))


def show_log(level: str) -> None:
    """Write what this process logs to standard error, from `level` (as the setting) on, in the form of its children."""
    from ...ranks.logs import LineFormatter

    handler = _LogHandler()
    handler.setFormatter(LineFormatter("run=none"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class _LogHandler(logging.Handler):
    """To what sys.stderr is when a line comes: a progress line keeps its place below it."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is None or not takes_now(2):
            return
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def _refused(error: OSError) -> OutputError:
    return OutputError(f"standard output cannot be written: {error.strerror}; the result is lost, write it elsewhere")
