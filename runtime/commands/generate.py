"""`leafsum generate`: prompts in, continuations out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ...errors import ConfigError
from ..sampling import Completion, SamplingParams
from .complete import complete, require_none_failed, say_what_was_cancelled
from .exit_codes import EXIT_INTERRUPTED
from .interrupts import FirstInterrupt
from .options import debug_option, resolve_settings, settings_options
from .prompts import PromptSource, gather_prompts
from .stdio import flush_output, on_terminal, printable, require_output, show_log, write_line
from .stream_text import stream_text

if TYPE_CHECKING:
    from ..stream import Delta

EPILOG = """\b
Examples:
  leafsum generate --model tiny --prompt "Once upon a time"
  leafsum generate --model DIR --tp 2 --chat --prompt "Name a river." --prompt "Name a lake." --json
  leafsum generate --model DIR --prompt-file story.txt --max-tokens 200
  cat prompts.txt | leafsum generate --model DIR --prompt-file - --one-prompt-per-line --json > results.jsonl
  leafsum generate --model DIR --prompt-ids 1,2,3          ids; also for a folder without a tokenizer
  leafsum generate --model DIR --prompt "A list:" --stream --stop $'\\n\\n' --stop END

\b
Prompts are served in the order --prompt, --prompt-file, --prompt-ids. Without --json the texts go to standard output
(ids where there is no tokenizer). With --json each prompt is one object on one line: prompt, text, token_ids,
token_sha256, finish_reason, tp, recoveries (gangs that were lost meanwhile), prompt_tokens, output_tokens,
residual_hash, prompt_token_ids, with --digests logits_sha256, with --layer-digests layer_digests_sha256 (of the
residual's hashes: each row, after each layer), stop_reason where a stop id or a --stop text ended it, and error where
this prompt alone failed (the others are printed). With --stream --json each piece is such a line: prompt_index,
token_ids, text; the last of a prompt has no id, and the prompt's object as completion.

\b
The first Ctrl-C while prompts are under way lets what has begun go on to its end, cancels the rest (finish_reason
cancelled), and writes the results; the second ends at once. If the whole run fails, results that were ready are lost:
--stream --json writes each as it ends. Exit codes: 0 done, 1 failed, 2 wrong use, 130 Ctrl-C, also with all results.

\b
Every setting is a variable too: --step-timeout-s is LEAFSUM_STEP_TIMEOUT_S; the flag wins.
"""

WITHOUT_TEXT = ("failed", "cancelled")
"""How a prompt ends that has nothing to write: an interrupt cancels what has not begun."""


@click.command(epilog=EPILOG)
@click.option("--prompt", "texts", multiple=True, metavar="TEXT", help="A prompt as raw text; repeatable.")
@click.option("--chat", is_flag=True, help="Each text is one user message: apply the model's chat template to it.")
@click.option(
    "--prompt-file", "files", multiple=True, metavar="FILE", help="A UTF-8 file as one prompt, - for standard input."
)
@click.option(
    "--one-prompt-per-line", is_flag=True, help="Every line of a --prompt-file is a prompt; an empty one is refused."
)
@click.option("--prompt-ids", "ids_texts", multiple=True, metavar="1,2,3", help="A prompt as token ids; repeatable.")
@click.option(
    "--max-tokens", type=int, default=128, show_default=True, metavar="N", help="Most tokens to write per prompt."
)
@click.option("--ignore-eos", is_flag=True, help="Go on past the model's stop ids, up to --max-tokens.")
@click.option(
    "--stop",
    multiple=True,
    metavar="TEXT",
    help="End before this text; repeatable. Taken as it is: for a line's end write $'\\n' in your shell.",
)
@click.option("--stream", is_flag=True, help="Write the text of one prompt as it comes; with --json, of any number.")
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object per prompt and line, and nothing else, on standard output."
)
@settings_options()
@debug_option
def generate(
    texts: tuple[str, ...],
    chat: bool,
    files: tuple[str, ...],
    one_prompt_per_line: bool,
    ids_texts: tuple[str, ...],
    max_tokens: int,
    ignore_eos: bool,
    stop: tuple[str, ...],
    stream: bool,
    as_json: bool,
    **flags: Any,
) -> int:
    """Continue prompts, greedily, on --tp rank processes."""
    require_output()
    settings = resolve_settings(flags)
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, stop=stop)
    prompts = gather_prompts(texts, files, ids_texts, one_per_line=one_prompt_per_line)
    show_log(settings.log_level)
    interrupt = FirstInterrupt()
    if not stream:
        completions = complete(settings, prompts, sampling, interrupt=interrupt, chat=chat)
        write_completions(completions, as_json)
    elif as_json:
        completions = complete(settings, prompts, sampling, interrupt=interrupt, chat=chat, on_delta=write_delta)
    else:
        shown = printable if on_terminal() else str
        prompt = the_one(prompts)
        completions = [stream_text(settings, prompt, sampling, interrupt=interrupt, chat=chat, shown=shown)]
    if interrupt.came:
        say_what_was_cancelled(completions)
        return EXIT_INTERRUPTED
    require_none_failed(completions)
    return 0


def write_completions(completions: Sequence[Completion], as_json: bool) -> None:
    for index, completion in enumerate(completions):
        if as_json:
            # ASCII only: some characters inside a text would end the line for a reader that splits by Unicode's rules.
            write_line(json.dumps(completion.to_dict(), ensure_ascii=True))
        elif completion.finish_reason not in WITHOUT_TEXT:
            write_text(completion, index, len(completions))


def write_text(completion: Completion, index: int, total: int) -> None:
    """The text alone for one prompt; with several, a line before each says which."""
    if total > 1:
        write_line(f"--- prompt {index + 1} of {total} ---")
    text = ",".join(map(str, completion.token_ids)) if completion.text is None else completion.text
    write_line(printable(text) if on_terminal() else text)


def write_delta(delta: Delta) -> None:
    found: dict[str, Any] = {"prompt_index": delta.prompt_index, "token_ids": delta.token_ids, "text": delta.text}
    if delta.completion is not None:
        found["completion"] = delta.completion.to_dict()
    write_line(json.dumps(found, ensure_ascii=True))
    flush_output()


def the_one(prompts: Sequence[PromptSource]) -> PromptSource:
    """The prompt whose text is streamed. Raises ConfigError for several."""
    if len(prompts) > 1:
        raise ConfigError(f"--stream: expected one prompt, found {len(prompts)}; add --json, whose lines say which")
    return prompts[0]
