"""`leafsum demo`: the shortest proof. One prompt at tp 1 and 2, the text, and both hashes."""

from __future__ import annotations

import click

from ...errors import ReceiptMismatch
from ..sampling import Completion, SamplingParams
from .complete import complete, require_none_failed
from .options import debug_option, resolve_settings
from .prompts import PromptSource
from .stdio import printable, require_output, write_line

PROMPT = "Adding the same numbers in the same order gives the same bits."
MAX_TOKENS = 32
RANK_COUNTS = (1, 2)


@click.command(epilog="Example: leafsum demo")
@debug_option
def demo() -> None:
    """Prove it on the tiny model: tp 1 equals tp 2.

    One prompt at both rank counts, its text, and both token hashes.

    The tiny model has random weights, so its text says nothing; what counts is that it is the same. Exit code 1 if it
    is not.
    """
    require_output()
    completions = [_complete(tp) for tp in RANK_COUNTS]
    require_none_failed(completions)
    write_line(f"prompt: {PROMPT}")
    for completion in completions:
        write_line(f"tp {completion.tp}: text         {printable(completion.text or '').replace(chr(10), ' ')}")
        write_line(f"tp {completion.tp}: token sha256 {completion.token_sha256}")
    first, *others = completions
    for other in others:
        if other.token_sha256 != first.token_sha256 or other.residual_hash != first.residual_hash:
            raise ReceiptMismatch(
                f"demo: expected the same tokens and hidden bits at tp {first.tp} and {other.tp}, found token sha256 "
                f"{first.token_sha256} and {other.token_sha256}, residual hashes {first.residual_hash} and "
                f"{other.residual_hash}"
            )
    write_line("equal: the same tokens, byte for byte, and the same hidden bits")


def _complete(tp: int) -> Completion:
    settings = resolve_settings({"model": "tiny", "tp": str(tp)})
    sampling = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    return complete(settings, [PromptSource(PROMPT, None, "demo")], sampling)[0]
