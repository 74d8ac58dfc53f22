"""What a caller asks of one prompt, and what comes back."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import PromptError
from .settings_rules import nearest_hint

MOST_STOP_STRINGS = 64
MOST_STOP_CHARACTERS = 4096
"""Of one stop string."""


def token_sha256(token_ids: Sequence[int]) -> str:
    """SHA-256 (hex) of the ids as little-endian uint32, a stop id included (docs/numerics.md section 8)."""
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}I", *token_ids)).hexdigest()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one prompt is continued: at most `max_tokens` tokens; `ignore_eos` goes on past the model's stop ids.

    `stop`: one text or several, kept as a tuple. The token whose text completes one of them is the last; the text ends
    before it. At most 64 of at most 4096 characters. Raises PromptError for anything else, and for an unknown name.
    """

    max_tokens: int = 128
    ignore_eos: bool = False
    stop: Sequence[str] = ()  # a str is one too

    def __new__(cls, *_values: object, **fields: object) -> SamplingParams:
        for name in fields:
            if name not in cls.__match_args__:
                known = nearest_hint(name, cls.__match_args__)
                raise PromptError(f"{name}: no such sampling parameter; {known}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        if type(self.max_tokens) is not int or self.max_tokens < 1:  # True is an int to isinstance
            raise PromptError(f"max_tokens: expected an integer of at least 1, found {self.max_tokens!r}")
        if type(self.ignore_eos) is not bool:
            raise PromptError(f"ignore_eos: expected True or False, found {self.ignore_eos!r}")
        object.__setattr__(self, "stop", _checked_stop(self.stop))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop)


def _checked_stop(stop: object) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else stop
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise PromptError(f"stop: expected a text, or a sequence of texts, found {stop!r}")
    if len(texts) > MOST_STOP_STRINGS:
        raise PromptError(f"stop: expected at most {MOST_STOP_STRINGS} texts, found {len(texts)}")
    for text in texts:
        if not 1 <= len(text) <= MOST_STOP_CHARACTERS:
            raise PromptError(f"stop: expected texts of 1 to {MOST_STOP_CHARACTERS} characters, found {len(text)}")
        if "\N{REPLACEMENT CHARACTER}" in text or any("\ud800" <= character <= "\udfff" for character in text):
            raise PromptError(
                f"stop: expected text without U+FFFD and lone surrogates, as no output has them: {text!r}"
            )
    return tuple(texts)


@dataclass(frozen=True, slots=True)
class Completion:
    """One prompt's result.

    `text` is None for a model folder without a tokenizer; `prompt` is None where ids were given. `finish_reason` is
    "stop", "length", "cancelled", or "failed", and then `error` says why. `stop_reason`: the id that stopped it, the
    last of `token_ids`; or the stop string, before which `text` ends (`token_ids` go up to the one that completes it);
    else None. A cancelled one has the tokens it had by then, and hashes as if they had been its limit; before its first
    token it has no hashes of rows, as no limit would leave it there. `tp`: the ranks of its last step, 0 where it was
    cancelled before any rank heard of it; `recoveries`: gangs that were lost while they computed it, and started again.
    `logits_sha256` is None without digests; `residual_hash` is 16 hex digits, or empty where there is none;
    `layer_hashes`, empty without layer digests, are U64 little-endian [rows, layers]: one hash of the residual for each
    position that was computed and each layer.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: Literal["stop", "length", "cancelled", "failed"]
    token_sha256: str
    logits_sha256: str | None
    residual_hash: str
    tp: int
    recoveries: int = 0
    error: str = ""
    layer_hashes: bytes = b""
    stop_reason: str | int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields that `generate --json` prints; the last four only where there is one."""
        found: dict[str, Any] = {
            "prompt": self.prompt,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "token_sha256": self.token_sha256,
            "finish_reason": self.finish_reason,
            "tp": self.tp,
            "recoveries": self.recoveries,
            "prompt_tokens": len(self.prompt_token_ids),
            "output_tokens": len(self.token_ids),
            "residual_hash": self.residual_hash,
            "prompt_token_ids": list(self.prompt_token_ids),
        }
        if self.logits_sha256 is not None:
            found["logits_sha256"] = self.logits_sha256
        if self.layer_hashes:
            found["layer_digests_sha256"] = hashlib.sha256(self.layer_hashes).hexdigest()
        if self.stop_reason is not None:
            found["stop_reason"] = self.stop_reason
        if self.error:
            found["error"] = self.error
        return found
