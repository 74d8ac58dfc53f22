"""What fits into a pool: how many requests at once, in how many pages, and how long one may be."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError, PromptError
from .settings import Settings

MAX_PAGES = 2**22
"""KV pages of a run: a plan that admits requests for all of them must stay within a message."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What fits. `prefill_chunk` 0: a prompt is one chunk. `max_context`: the most positions one request may take."""

    prefill_chunk: int
    concurrency: int
    num_slots: int
    num_pages: int
    page_size: int
    max_context: int

    @classmethod
    def of(cls, settings: Settings, model_max_context: int) -> Limits:
        """`kv_tokens` rounded up to pages, shared by `concurrency` slots.

        Raises ConfigError for a context the model lacks.
        """
        if settings.max_context > model_max_context:
            raise ConfigError(
                f"max_context: expected at most {model_max_context:,} (the model's), got {settings.max_context:,}"
            )
        num_pages = -(-settings.kv_tokens // settings.page_size)
        if num_pages > MAX_PAGES:
            raise ConfigError(
                f"kv_tokens {settings.kv_tokens:,} in pages of {settings.page_size} are {num_pages:,} pages; at most "
                f"{MAX_PAGES:,} can be handed out. Raise --page-size"
            )
        return cls(
            prefill_chunk=settings.prefill_chunk,
            concurrency=settings.concurrency,
            num_slots=settings.concurrency,
            num_pages=num_pages,
            page_size=settings.page_size,
            max_context=min(settings.max_context or model_max_context, num_pages * settings.page_size),
        )

    def check_fits(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raise PromptError for a request that could never run, whatever else finishes."""
        num_positions = num_prompt_tokens + max_tokens
        if num_prompt_tokens < 1:
            raise PromptError("expected a prompt of at least one token, got none")
        if max_tokens < 1:
            raise PromptError(f"expected max_tokens of at least 1, got {max_tokens}")
        if num_positions > self.max_context:
            largest = self.max_context - num_prompt_tokens
            advice = f"ask for at most {largest:,} tokens" if largest > 0 else "shorten the prompt"
            raise PromptError(
                f"a prompt of {num_prompt_tokens:,} tokens with max_tokens {max_tokens:,} needs {num_positions:,} "
                f"positions; this pool serves {self.max_context:,} (the least of the model's context, --max-context "
                f"and --kv-tokens): {advice}"
            )
