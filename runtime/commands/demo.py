"""`leafsum demo`: the shortest proof. One prompt at tp 1 and 2, the texts as they come, and both hashes."""

from __future__ import annotations

import click

from ...errors import ReceiptMismatch
from ..sampling import Completion, SamplingParams
from .complete import require_none_failed
from .interrupts import FirstInterrupt
from .options import debug_option, resolve_settings
from .prompts import PromptSource
from .stdio import flush_output, printable, require_output, show_log, write_line
from .stream_text import stream_text

PROMPT = "Adding the same numbers in the same order gives the same bits."
MAX_TOKENS = 32
RANK_COUNTS = (1, 2)


@click.command(epilog="Example: leafsum demo")
@debug_option
def demo() -> None:
    """Prove it on the tiny model: tp 1 equals tp 2.

    One prompt at both rank counts, its text as it comes, and both token hashes.

    The tiny model has random weights, so its text says nothing; what counts is that it is the same. Exit code 1 if it
    is not.
    """
    require_output()
    first = _complete(RANK_COUNTS[0], f"prompt: {PROMPT}\n")
    for tp in RANK_COUNTS[1:]:
        other = _complete(tp)
        if other.token_sha256 != first.token_sha256 or other.residual_hash != first.residual_hash:
            raise ReceiptMismatch(
                f"demo: expected the same tokens and hidden bits at tp {first.tp} and {other.tp}, found token sha256 "
                f"{first.token_sha256} and {other.token_sha256}, residual hashes {first.residual_hash} and "
                f"{other.residual_hash}"
            )
    write_line("equal: the same tokens, byte for byte, and the same hidden bits")


def _complete(tp: int, before: str = "") -> Completion:
    """`before` stands above its lines. After a Ctrl-C, KeyboardInterrupt when the text is written."""
    settings = resolve_settings({"model": "tiny", "tp": str(tp)})
    show_log(settings.log_level)
    sampling = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    prompt = PromptSource(PROMPT, None, "demo")
    heading = f"{before}tp {tp}: text         "
    interrupt = FirstInterrupt()
    completion = stream_text(settings, prompt, sampling, interrupt=interrupt, heading=heading, shown=_in_a_line)
    if interrupt.came:
        raise KeyboardInterrupt
    require_none_failed([completion])
    write_line(f"tp {tp}: token sha256 {completion.token_sha256}")
    flush_output()
    return completion


def _in_a_line(text: str) -> str:
    return printable(text).replace("\n", " ")
