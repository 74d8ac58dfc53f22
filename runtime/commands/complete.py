"""Prompts to completions: one pool from its start to its end, with progress, for whichever command wants texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import PromptError, RequestFailed
from ..sampling import Completion, SamplingParams
from ..settings import Settings
from .interrupts import FirstInterrupt
from .progress import Display
from .prompts import PromptSource
from .stdio import say

if TYPE_CHECKING:
    from ..stream import Delta
    from ..tokenizer import Tokenizer


def complete(
    settings: Settings,
    prompts: Sequence[PromptSource],
    sampling: SamplingParams,
    *,
    interrupt: FirstInterrupt,
    chat: bool = False,
    on_delta: Callable[[Delta], None] | None = None,
) -> list[Completion]:
    """One pool, all prompts, in order. A completion's `prompt` is the text as the user gave it.

    With `on_delta`, it is told what comes as it comes, and progress is shown only until then. `interrupt` takes the
    first Ctrl-C that comes while the prompts are under way; before and after that it ends the program at once.
    """
    with Display() as display:
        display.stage("reading prompts")
        ids = prompt_ids(settings, prompts, sampling.max_tokens, chat=chat, stop_strings=sampling.stop_strings)
        from ..pool import WorkerPool

        display.stage(f"starting {settings.tp} rank{'s' if settings.tp > 1 else ''}")
        with WorkerPool(settings) as pool:
            display.stage("generating")
            with pool.stream(ids, sampling) as stream, interrupt.draining(pool.drain):
                if on_delta is not None:
                    display.end()
                    for delta in stream:
                        on_delta(_delta_as_given(delta, prompts))
                completions = stream.result(display.on_progress)
            display.stage("closing")
    return as_given(completions, prompts)


def as_given(completions: Sequence[Completion], prompts: Sequence[PromptSource]) -> list[Completion]:
    """The completions of `prompt_ids(prompts)`, each with the text that the user gave."""
    return [replace(found, prompt=prompt.text) for found, prompt in zip(completions, prompts, strict=True)]


def _delta_as_given(delta: Delta, prompts: Sequence[PromptSource]) -> Delta:
    if delta.completion is None:
        return delta
    return replace(delta, completion=replace(delta.completion, prompt=prompts[delta.prompt_index].text))


def say_what_was_cancelled(completions: Sequence[Completion]) -> None:
    """After an interrupt, where the exit code cannot say more."""
    num_cancelled = sum(found.finish_reason == "cancelled" for found in completions)
    told = f"interrupted: {num_cancelled} of {len(completions)} prompts were cancelled before they began"
    if not num_cancelled:
        told = "interrupted: every prompt had begun, and has its result"
    say("; ".join([told, *_failures(completions)]))


def require_none_failed(completions: Sequence[Completion]) -> None:
    """RequestFailed with the error of every request that failed alone."""
    if failures := _failures(completions):
        raise RequestFailed("; ".join(failures))


def _failures(completions: Sequence[Completion]) -> list[str]:
    errors = [f"prompt {index}: {found.error}" for index, found in enumerate(completions, start=1) if found.error]
    return [f"{len(errors)} of {len(completions)} prompts failed: {'; '.join(errors)}"] if errors else []


def prompt_ids(
    settings: Settings,
    prompts: Sequence[PromptSource],
    max_tokens: int,
    *,
    chat: bool = False,
    stop_strings: Sequence[str] = (),
) -> list[tuple[int, ...]]:
    """Token ids of every prompt, checked against the model before any process starts. `chat`: a text is one message.

    Raises ConfigError and ModelError for the settings and the model folder, PromptError that names the first prompt
    which cannot be served, counted from 1.
    """
    from ...ranks.configs.load import load_spec
    from ..limits import Limits
    from ..models import resolve_model
    from ..open_request import no_stop_strings
    from ..tokenizer import Tokenizer

    if chat and any(prompt.text is None for prompt in prompts):
        raise PromptError("--chat: expected texts, found --prompt-ids; ids go to the model as they are, without --chat")
    model_dir = resolve_model(settings.model)
    spec = load_spec(model_dir)
    limits = Limits.of(settings, spec.max_context)
    tokenizer = Tokenizer.open(model_dir)
    if tokenizer is None and any(prompt.text is not None for prompt in prompts):
        raise PromptError(f"the model folder {model_dir} has no tokenizer.json; give --prompt-ids instead of texts")
    if tokenizer is None and stop_strings:
        raise PromptError(f"--stop: {no_stop_strings(model_dir)}")
    all_ids = []
    for number, prompt in enumerate(prompts, start=1):
        try:
            ids = _ids_of(prompt, tokenizer, chat)
            _check_in_vocabulary(ids, spec.vocab_size)
            limits.check_fits(len(ids), max_tokens)
        except PromptError as error:
            raise PromptError(f"prompt {number} ({prompt.where}): {error}") from error
        all_ids.append(ids)
    return all_ids


def _ids_of(prompt: PromptSource, tokenizer: Tokenizer | None, chat: bool) -> tuple[int, ...]:
    if prompt.text is None or tokenizer is None:
        return prompt.token_ids or ()
    if not chat:
        return tuple(tokenizer.encode(prompt.text))
    message = tokenizer.chat([{"role": "user", "content": prompt.text}])
    return tuple(tokenizer.encode(message, add_special_tokens=False))


def _check_in_vocabulary(token_ids: Sequence[int], vocab_size: int) -> None:
    for entry, token_id in enumerate(token_ids, start=1):
        if not 0 <= token_id < vocab_size:
            raise PromptError(f"expected a token id of 0 to {vocab_size - 1}, found {token_id} as entry {entry}")
