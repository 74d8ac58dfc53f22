"""Tokens to text while they come: always the text of the whole output, at a cost that its length does not change.

What a token adds depends on its neighbours: bytes of one character, spaces between words, the first word's missing
space. So a few tokens before it are joined again with it, and what they had is cut off. Where tokens were dropped
before those few, an ANCHOR stands for them: with it, nothing is taken for the first word. Tests compare with the text
of the whole output, for every prefix of it and tokenizers of all kinds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What stands for bytes that are no character, or not yet one."""

ANCHOR = "x"
"""A token that is a letter in every spelling of tokens."""

KNOWN_TOKENS = 8
"""Tokens joined again: a character has at most four bytes, so at most three of its tokens lie before its last."""

BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


class Window:
    """The last tokens whose text is known, and the text of what comes after them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: list[str] = []
        self._known_length = 0

    def text_after(self, tokens: Sequence[str]) -> str:
        return self._tokenizer.join([*self._known, *tokens])[self._known_length :]

    def move_past(self, tokens: Sequence[str], num_held: int) -> None:
        """`tokens` are known now, but for the last `num_held` characters of their text."""
        self._restart([*self._known, *tokens], KNOWN_TOKENS, num_held)

    def move_to(self, tokens: Sequence[str]) -> None:
        """`tokens` are known now, and no longer those before them."""
        self._restart([*self._known, *tokens], len(tokens), 0)

    def _restart(self, tokens: list[str], num_kept: int, num_held: int) -> None:
        # While there is no text yet, the next token may still be the first word: all are kept.
        if len(tokens) > num_kept and self._known_length > 0:
            tokens = [ANCHOR, *tokens[-num_kept:]]
        self._known = tokens
        self._known_length = len(self._tokenizer.join(self._known)) - num_held


class Detokenizer:
    """The text of one output, as far as no later token can change it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window = Window(tokenizer)
        self._open_bytes: list[str] = []
        """A run of byte tokens that goes on: one that is no UTF-8 in the end has no character, from its start."""

    def push(self, token_id: int) -> str:
        """The text that is certain from this token on, and was not before."""
        token = self._tokenizer.token(token_id)
        if token is None:
            return ""
        tokens = [*self._open_bytes, token]
        if is_byte(token, self._tokenizer):
            self._open_bytes.append(token)
            return ""
        text = self._window.text_after(tokens)
        num_held = int(text.endswith(REPLACEMENT))
        self._window.move_past(tokens, num_held)
        self._open_bytes.clear()
        return text[: len(text) - num_held]


def is_byte(token: str, tokenizer: Tokenizer) -> bool:
    """Whether a token is one byte of a run, where the tokenizer falls back to bytes."""
    return tokenizer.has_byte_fallback and BYTE_TOKEN.fullmatch(token) is not None
