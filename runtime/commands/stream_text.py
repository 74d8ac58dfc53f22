"""A text on standard output as it comes: for whichever command writes one that way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..sampling import Completion, SamplingParams
from ..settings import Settings
from .complete import complete
from .interrupts import FirstInterrupt
from .prompts import PromptSource
from .stdio import flush_output, write, write_line

if TYPE_CHECKING:
    from ..stream import Delta


def stream_text(
    settings: Settings,
    prompt: PromptSource,
    sampling: SamplingParams,
    *,
    interrupt: FirstInterrupt,
    chat: bool = False,
    heading: str = "",
    shown: Callable[[str], str] = str,
) -> Completion:
    """One prompt's text (ids where there is no tokenizer), every piece `shown` and flushed, and then a line's end: also
    where Ctrl-C or an error stops it. The heading stands before the first piece, and comes with it.
    """
    is_begun = False

    def write_piece(delta: Delta) -> None:
        nonlocal is_begun
        text = delta.text
        if text is None:
            text = "," * is_begun + ",".join(map(str, delta.token_ids)) if delta.token_ids else ""
        write(heading * (bool(text) and not is_begun) + shown(text))
        flush_output()
        is_begun = is_begun or bool(text)

    try:
        (completion,) = complete(settings, [prompt], sampling, interrupt=interrupt, chat=chat, on_delta=write_piece)
    except BaseException:
        if is_begun:
            write_line("")
        raise
    if is_begun or completion.finish_reason not in ("failed", "cancelled"):
        write_line("" if is_begun else heading)
    return completion
