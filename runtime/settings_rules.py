"""What one setting accepts: how its text is read, how its value is checked, and what it means for bits."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..errors import ConfigError

TRUE_WORDS = ("1", "true", "yes", "on")
FALSE_WORDS = ("0", "false", "no", "off")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None where none is like it."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)), None)


def nearest_hint(name: str, known: Iterable[str], shared_prefix: str = "") -> str:
    """'did you mean X?', or all known names where none is like `name`. A prefix that all share makes nothing alike."""
    names = [each.removeprefix(shared_prefix) for each in sorted(known)]
    close = nearest(name.removeprefix(shared_prefix), names)
    if close:
        return f"did you mean {shared_prefix}{close}?"
    return f"known are {', '.join(shared_prefix + each for each in names)}"


@dataclass(frozen=True, slots=True)
class Rule:
    """One setting's type, limits and help. A numeric setting enters the settings digest; every other one keeps bits.

    `bits` says which of the two it is, in help texts; the model is neither: its files have a digest of their own.
    `for_receipts`: an argument of WorkerPool only, neither a flag nor a variable. `words` are texts that stand for
    values; `pattern` is a regular expression where `choices` alone cannot say what is right.
    """

    kind: type[str] | type[int] | type[float] | type[bool]
    help: str
    numeric: bool = False
    choices: tuple[str, ...] = ()
    pattern: str = ""
    at_least: float = 0
    at_most: float = math.inf
    words: Mapping[str, int] = field(default_factory=dict)
    metavar: str = "TEXT"
    has_own_digest: bool = False
    for_receipts: bool = False

    @property
    def bits(self) -> str:
        if self.has_own_digest:
            return "has its own digest"
        return "numeric: enters the settings digest" if self.numeric else "keeps bits"

    def expected(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.kind is bool:
            return f"one of {', '.join(TRUE_WORDS + FALSE_WORDS)}"
        if self.kind is str:
            return "a text that is not empty"
        what = "an integer" if self.kind is int else "a number of seconds"
        limit = f" and at most {self.at_most:,.0f}" if self.at_most < math.inf else ""
        words = "".join(f", or {word}" for word in self.words)
        return f"{what} of at least {self.at_least:g}{limit}{words}"

    def read(self, value: object, where: str) -> str | int | float | bool:
        """A flag's or variable's text, or a typed value, to the setting's value; ConfigError names `where`."""
        try:
            typed = self._parse(value.strip()) if isinstance(value, str) and self.kind is not str else value
        except ValueError:
            raise self._refusal(value, where) from None
        return self.check(typed, where)

    def check(self, value: object, where: str) -> str | int | float | bool:
        """The value itself, as `kind`, when the setting accepts it; else ConfigError."""
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, self.kind) or (isinstance(value, bool) and self.kind is not bool):
            raise self._refusal(value, where)
        if not self._accepts(value):
            raise self._refusal(value, where)
        return value

    def _parse(self, text: str) -> str | int | float | bool:
        if text in self.words:
            return self.words[text]
        if self.kind is not bool:
            if not text.isascii() or "_" in text:  # int() would take 1_000 and the digits of any script
                raise ValueError(text)
            return self.kind(text)
        if text.lower() in TRUE_WORDS + FALSE_WORDS:
            return text.lower() in TRUE_WORDS
        raise ValueError(text)

    def _accepts(self, value: str | int | float | bool) -> bool:
        if isinstance(value, bool):
            return True
        if isinstance(value, str):
            if self.pattern:
                return re.fullmatch(self.pattern, value) is not None
            return value in self.choices if self.choices else bool(value) and "\0" not in value
        return math.isfinite(value) and self.at_least <= value <= self.at_most

    def _refusal(self, value: object, where: str) -> ConfigError:
        close = nearest(value, [*self.choices, *self.words]) if isinstance(value, str) else None
        hint = f"; did you mean {close}?" if close else ""
        return ConfigError(f"{where}: expected {self.expected()}, found {value!r}{hint}")
