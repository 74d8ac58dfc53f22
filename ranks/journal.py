"""The ordered events of one process or one rank: each is one line of the log, and the newest are kept for an error.

A line is `run=RUN rank=1 step=7 event=NAME key=value ...`, in that order, so that one run's lines can be sorted by rank
and step with a text tool. Times are CLOCK_MONOTONIC, which all processes of a host share: the events that a rank tells
in its Failure and those that the coordinator noted of it merge into one order.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

NUM_EVENTS_KEPT = 64
"""Of one rank. About thirty steps: a step is a plan and its answer."""

MAX_FACTS_CHARACTERS = 1 << 16
"""Of one event, where a rank tells it: more than ten facts, each as long as may be and all of it escaped."""

MAX_VALUE_CHARACTERS = 1000
"""Of one fact, in the record and in the log: a text that quotes a file may be as long as the file."""


class Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`at_s`: time.monotonic() seconds. `step` is -1 before the first. `facts` is `key=value ...`, maybe empty."""

    at_s: Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
    name: Annotated[str, msgspec.Meta(max_length=1024)]
    step: Annotated[int, msgspec.Meta(ge=-1, lt=2**31)] = -1
    facts: Annotated[str, msgspec.Meta(max_length=MAX_FACTS_CHARACTERS)] = ""

    def line(self, now_s: float) -> str:
        """For a person: how long ago, and what."""
        step = f" step {self.step}" if self.step >= 0 else ""
        return f"{self.at_s - now_s:+9.3f} s{step} {self.name} {self.facts}".rstrip()


class Journal:
    """Notes events of one rank. From any thread."""

    def __init__(self, logger: logging.Logger, run_id: str, rank: int) -> None:
        self._logger = logger
        self._where = f"run={run_id} rank={rank}"
        self._noted: deque[tuple[float, str, int, dict[str, object]]] = deque(maxlen=NUM_EVENTS_KEPT)

    def note(self, name: str, step: int = -1, *, level: int = logging.DEBUG, **facts: object) -> None:
        """Keep the event, and log it at `level`. `facts` are told in their order.

        2 us where it is not logged: few events are ever told, and text is made of those alone.
        """
        plain = {key: value if type(value) in _PLAIN else str(value) for key, value in facts.items()}
        self._noted.append((time.monotonic(), name, step, plain))
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", _line(self._where, name, step, plain))

    @property
    def events(self) -> tuple[Event, ...]:
        """Oldest first."""
        noted = self._noted.copy()  # in one go, while another thread may note
        return tuple(Event(at_s=at_s, name=name, step=step, facts=_told(facts)) for at_s, name, step, facts in noted)


def event_line(run_id: str, name: str, rank: int = -1, step: int = -1, **facts: object) -> str:
    """An event that is logged and not kept. `rank` is -1 where it is about none."""
    return _line(f"run={run_id}" + (f" rank={rank}" if rank >= 0 else ""), name, step, facts)


def merged_lines(*records: Iterable[Event]) -> tuple[str, ...]:
    """Records of the same host as one, in the order of time, each event as a line that says how long ago it was."""
    now_s = time.monotonic()
    events = sorted((event for record in records for event in record), key=lambda event: event.at_s)
    return tuple(event.line(now_s) for event in events)


def _line(where: str, name: str, step: int, facts: Mapping[str, object]) -> str:
    at_step = f" step={step}" if step >= 0 else ""
    return f"{where}{at_step} event={name} {_told(facts)}".rstrip()


_PLAIN = (str, int, float)
"""What is kept as it is; of anything else the text is, and not the object."""


def _told(facts: Mapping[str, object]) -> str:
    return " ".join(f"{key}={quoted(value)}" for key, value in facts.items())


def quoted(value: object) -> str:
    """One word: quoted where it has a space or is empty, so that a line can be split at its spaces."""
    text = (f"{value:.3f}" if isinstance(value, float) else str(value))[:MAX_VALUE_CHARACTERS]
    is_word = bool(text) and text.isprintable() and not any(c in text for c in ' "=')
    return text if is_word else '"' + text.encode("unicode_escape").decode().replace('"', '\\"') + '"'
