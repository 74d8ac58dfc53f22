"""A process that is measured: asked in lines of JSON, and gone when its asker is."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from ...errors import DeadlineExceeded, LeafsumError
from ..child import describe_exit

ANSWER_TIMEOUT_S = 600.0
"""The longest wait for one answer: a large model that another library reads from disk."""

LEAVE_TIMEOUT_S = 10.0
ERROR_LINES = 3
"""How many of the last lines on its standard error an error quotes."""


class Helper:
    """`python -m MODULE ARGUMENTS`, which serves lines of JSON until its standard input ends. A context manager."""

    def __init__(self, role: str, module: str, arguments: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self.role = role
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with this object)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | (env or {}),
            start_new_session=True,  # Ctrl-C is for this process, which then closes its helpers
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions, self._answers = self._process.stdin, self._process.stdout

    def ask(self, question: Mapping[str, Any], timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """Its answer. Raises LeafsumError with its last words where it has ended, DeadlineExceeded."""
        try:
            self._questions.write(json.dumps(question).encode() + b"\n")
            self._questions.flush()
        except BrokenPipeError:
            raise self._ended() from None
        answers = select.poll()
        answers.register(self._answers, select.POLLIN)
        if not answers.poll(timeout_s * 1000):
            what = f"an answer of {self.role}"
            text = f"expected {what} within {timeout_s:g} s, found none; its last words: {self._last_words()}"
            raise DeadlineExceeded(text, what=what, timeout_s=timeout_s)
        line = self._answers.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Let it leave, or kill it. Safe to call again."""
        self._answers.close()  # it may be writing one that nobody reads
        with contextlib.suppress(BrokenPipeError):  # it has ended with a question unread
            self._questions.close()
        try:
            self._process.wait(LEAVE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._process.kill()  # it may be at work for minutes more, and nobody wants the answer
        self.close()

    def _ended(self) -> LeafsumError:
        ending = describe_exit(self._process.wait(LEAVE_TIMEOUT_S))
        return LeafsumError(f"expected an answer of {self.role}, but it ended ({ending}): {self._last_words()}")

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return " | ".join([line.strip() for line in lines if line.strip()][-ERROR_LINES:]) or "it said nothing"
