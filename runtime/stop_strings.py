"""Stop strings: which token completes one, and what text may still become one."""

from __future__ import annotations

from collections.abc import Sequence

from .detokenizer import REPLACEMENT, Window, is_byte
from .tokenizer import Tokenizer

CHARACTER_BYTES = 4


def first_stop(text: str, stop_strings: Sequence[str]) -> tuple[int, str] | None:
    """Where the earliest stop string begins, and which it is; of several there, the one named first."""
    found = [(text.find(stop), stop) for stop in stop_strings]
    return min((each for each in found if each[0] >= 0), key=lambda each: each[0], default=None)


class Beginnings:
    """How much of the end of a text, in which no stop string is, may be the beginning of one: told as the text comes.

    A character costs the same few looks at every stop string on average, however long they are.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._all = [_Beginning(stop) for stop in stop_strings]

    def push(self, text: str) -> int:
        """The number of characters, after `text` has come."""
        for beginning in self._all:
            for character in text:
                beginning.push(character)
        return max((beginning.length for beginning in self._all), default=0)


class _Beginning:
    """The longest beginning of one stop string that the text ends with, which is `length` characters long."""

    def __init__(self, stop: str) -> None:
        self.length = 0
        self._stop = stop
        self._borders = [0]
        """Of the first 1, 2, ... characters, as far as they were met: the longest beginning that is their end too."""

    def push(self, character: str) -> None:
        self.length = self._after(self.length, character)
        if self.length > len(self._borders):
            self._borders.append(self._after(self._borders[-1], character))
        if self.length == len(self._stop):
            self.length = self._borders[-1]

    def _after(self, length: int, character: str) -> int:
        while self._stop[length] != character:
            if length == 0:
                return 0
            length = self._borders[length - 1]
        return length + 1


class StopFinder:
    """Searches one output, token by token. The text after a token is that of the whole output up to it."""

    def __init__(self, tokenizer: Tokenizer, stop_strings: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop_strings = stop_strings
        self._num_searched_again = max(map(len, stop_strings)) - 1
        self._tail = ""
        """The end of the known text: a stop string may begin there."""
        self._window = Window(tokenizer)
        self._pending: list[str] = []
        """Byte tokens that are not yet a character, and do not belong to the window."""

    def push(self, token_id: int) -> str:
        """The stop string that this token completes, the earliest in the text where it is several; "" for none."""
        token = self._tokenizer.token(token_id)
        if token is None:
            return ""
        self._pending.append(token)
        new = self._window.text_after(self._pending)
        found = first_stop(self._tail + new, self._stop_strings)
        if found is not None:
            return found[1]
        self._move(new, is_byte(token, self._tokenizer))
        return ""

    def _move(self, new: str, in_run: bool) -> None:
        """No stop string has a replacement character, so what a run of bytes is when it turns out to be no UTF-8 need
        not be known: it has one somewhere after the last whole character, and nothing before it can matter."""
        num_held = int(new.endswith(REPLACEMENT))
        if in_run and num_held:
            del self._pending[CHARACTER_BYTES:]  # more bytes without a character: the run has none until its end
            return
        if in_run:
            self._window.move_to(self._pending)
        else:
            self._window.move_past(self._pending, num_held)
        text = self._tail + new[: len(new) - num_held]
        self._tail = text[len(text) - self._num_searched_again :] if self._num_searched_again < len(text) else text
        self._pending.clear()
