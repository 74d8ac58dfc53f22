"""What a caller asks of one prompt, and what comes back."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import PromptError


def token_sha256(token_ids: Sequence[int]) -> str:
    """SHA-256 (hex) of the ids as little-endian uint32, a stop id included (docs/numerics.md section 8)."""
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}I", *token_ids)).hexdigest()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one prompt is continued: at most `max_tokens` tokens; `ignore_eos` goes on past the model's stop ids."""

    max_tokens: int = 128
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if type(self.max_tokens) is not int or self.max_tokens < 1:  # True is an int to isinstance
            raise PromptError(f"max_tokens: expected an integer of at least 1, found {self.max_tokens!r}")
        if type(self.ignore_eos) is not bool:
            raise PromptError(f"ignore_eos: expected True or False, found {self.ignore_eos!r}")


@dataclass(frozen=True, slots=True)
class Completion:
    """One prompt's result.

    `text` is None for a model folder without a tokenizer; `prompt` is None where ids were given. `finish_reason` is
    "stop" (a stop id, which is the last of `token_ids`), "length", or "failed", and then `error` says why.
    `logits_sha256` is None without digests; `residual_hash` is 16 hex digits; `layer_hashes`, empty without layer
    digests, are U64 little-endian [rows, layers]: one hash of the residual for each position that was computed and
    each layer.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: Literal["stop", "length", "failed"]
    token_sha256: str
    logits_sha256: str | None
    residual_hash: str
    tp: int
    error: str = ""
    layer_hashes: bytes = b""

    def to_dict(self) -> dict[str, Any]:
        """The fields that `generate --json` prints; logits_sha256 only with digests, error only where it failed."""
        found: dict[str, Any] = {
            "prompt": self.prompt,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "token_sha256": self.token_sha256,
            "finish_reason": self.finish_reason,
            "tp": self.tp,
            "prompt_tokens": len(self.prompt_token_ids),
            "output_tokens": len(self.token_ids),
            "residual_hash": self.residual_hash,
            "prompt_token_ids": list(self.prompt_token_ids),
        }
        if self.logits_sha256 is not None:
            found["logits_sha256"] = self.logits_sha256
        if self.error:
            found["error"] = self.error
        return found
