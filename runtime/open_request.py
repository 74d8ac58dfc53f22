"""One request under way, on the pool's side: what was asked, the tokens so far, and what it comes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..errors import PromptError, ProtocolError
from .messages import Finished, Order
from .sampling import Completion, SamplingParams, token_sha256
from .stop_strings import first_stop
from .tokenizer import Tokenizer


@dataclass(slots=True)
class OpenRequest:
    """`index` is the prompt's among those it was given with; `request_id` is the pool's own."""

    index: int
    request_id: int
    prompt: str | None
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    output: list[int] = field(default_factory=list)

    def order(self, eos_ids: tuple[int, ...]) -> Order:
        return Order(
            request_id=self.request_id,
            token_ids=self.prompt_ids,
            max_tokens=self.params.max_tokens,
            stop_ids=() if self.params.ignore_eos else eos_ids,
            stop_strings=self.params.stop_strings,
        )

    def completion(self, finished: Finished, tokenizer: Tokenizer | None) -> Completion:
        """Raises PromptError for a request that was refused, ProtocolError where tokens are missing."""
        if finished.reason == "refused":
            raise PromptError(f"prompt {self.index}: {finished.error}")
        if finished.num_output_tokens != len(self.output):
            raise ProtocolError(
                f"request {self.request_id} ended after {finished.num_output_tokens} tokens, {len(self.output)} came: "
                "another process took part in the conversation"
            )
        failed = finished.reason == "failed"
        has_no_rows_to_tell = finished.reason == "cancelled" and not self.output  # those of no limit
        return Completion(
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            token_ids=tuple(self.output),
            text=self._text(finished.stop_string, tokenizer) if tokenizer else None,
            finish_reason=finished.reason,
            token_sha256=token_sha256(self.output),
            logits_sha256=(not failed and finished.logits_sha256) or None,
            residual_hash="" if failed or has_no_rows_to_tell else f"{finished.residual_hash:016x}",
            tp=finished.num_ranks,
            recoveries=finished.num_recoveries,
            error=finished.error,
            layer_hashes=b"" if has_no_rows_to_tell else finished.layer_hashes,
            stop_reason=finished.stop_string or (self.output[-1] if finished.reason == "stop" else None),
        )

    def _text(self, stop_string: str, tokenizer: Tokenizer) -> str:
        """The text of the whole output, up to the stop string that ended it."""
        text = tokenizer.decode(self.output)
        if not stop_string:
            return text
        found = first_stop(text, self.params.stop_strings)
        if found is None or found[1] != stop_string:
            raise ProtocolError(
                f"request {self.request_id} ended at the stop string {stop_string!r}; expected it first in the text of "
                f"its tokens, found {found}"
            )
        return text[: found[0]]


def no_stop_strings(model_dir: Path) -> str:
    """Why a model folder without a tokenizer refuses stop strings."""
    return f"expected a model folder with a tokenizer.json, to have a text to search; {model_dir} has none"
