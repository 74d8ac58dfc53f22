"""Prompts to completions: one pool from its start to its end, with progress, for whichever command wants texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...errors import PromptError, RequestFailed
from ..sampling import Completion, SamplingParams
from ..settings import Settings
from .progress import Display
from .prompts import PromptSource


def complete(
    settings: Settings, prompts: Sequence[PromptSource], sampling: SamplingParams, *, chat: bool = False
) -> list[Completion]:
    """One pool, all prompts, in order. A completion's `prompt` is the text as the user gave it."""
    given = apply_chat(settings, prompts) if chat else [prompt.given for prompt in prompts]
    from ..pool import WorkerPool

    with Display() as display:
        display.stage(f"starting {settings.tp} rank{'s' if settings.tp > 1 else ''}")
        with WorkerPool(settings) as pool:
            display.stage("generating")
            completions = pool.generate(given, sampling, on_progress=display.on_progress)
            display.stage("closing")
    return [replace(found, prompt=prompt.text) for found, prompt in zip(completions, prompts, strict=True)]


def require_none_failed(completions: Sequence[Completion]) -> None:
    """RequestFailed with the error of every request that failed alone."""
    errors = [f"prompt {index}: {found.error}" for index, found in enumerate(completions, start=1) if found.error]
    if errors:
        raise RequestFailed(f"{len(errors)} of {len(completions)} prompts failed: {'; '.join(errors)}")


def apply_chat(settings: Settings, prompts: Sequence[PromptSource]) -> list[list[int]]:
    """Ids of every text as one user message. PromptError when the model has no tokenizer, or ids were given."""
    from ..models import resolve_model
    from ..tokenizer import Tokenizer

    if any(prompt.text is None for prompt in prompts):
        raise PromptError("--chat: expected texts, found --prompt-ids; ids go to the model as they are, without --chat")
    model_dir = resolve_model(settings.model)
    tokenizer = Tokenizer.open(model_dir)
    if tokenizer is None:
        raise PromptError(f"--chat: the model folder {model_dir} has no tokenizer.json; give --prompt-ids instead")
    texts = [tokenizer.chat([{"role": "user", "content": prompt.text or ""}]) for prompt in prompts]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]
