"""Prompts as the command line gives them: texts, files, standard input, token ids."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import PromptError

STDIN = "-"


@dataclass(frozen=True, slots=True)
class PromptSource:
    """One prompt: a text or token ids, never both, and where it came from for error texts."""

    text: str | None
    token_ids: tuple[int, ...] | None
    where: str


def gather_prompts(
    texts: Sequence[str], files: Sequence[str], ids_texts: Sequence[str], *, one_per_line: bool = False
) -> list[PromptSource]:
    """Prompts in the order --prompt, --prompt-file, --prompt-ids. PromptError when there is none or a wrong one."""
    prompts = [PromptSource(_checked_text(text, "--prompt"), None, "--prompt") for text in texts]
    for file in files:
        prompts += _prompts_of_file(file, one_per_line)
    prompts += [PromptSource(None, parse_ids(text), "--prompt-ids") for text in ids_texts]
    if not prompts:
        raise PromptError("no prompt: expected at least one --prompt TEXT, --prompt-file FILE or --prompt-ids 1,2,3")
    return prompts


def parse_ids(text: str) -> tuple[int, ...]:
    """'1,2,3' to ids. Whether they lie in the vocabulary is for who knows the model to say."""
    if not text.strip():
        raise PromptError("--prompt-ids: the prompt is empty; expected ids such as 1,2,3")
    parts = [part.strip() for part in text.split(",")]
    for index, part in enumerate(parts):
        if re.fullmatch(r"[0-9]{1,10}", part) is None:
            raise PromptError(
                f"--prompt-ids: expected integers of at least 0 between commas, such as 1,2,3, found {part!r} as entry "
                f"{index + 1}"
            )
    return tuple(int(part) for part in parts)


def _prompts_of_file(file: str, one_per_line: bool) -> list[PromptSource]:
    name = "standard input" if file == STDIN else f"prompt file {file}"
    text = _decoded(_read_bytes(file, name), name)
    if not one_per_line:
        return [PromptSource(_checked_text(text, name), None, name)]
    # Only \n and \r\n end a line: str.splitlines would also cut at characters that belong to a prompt.
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    return [
        PromptSource(_checked_text(line, where), None, where)
        for where, line in ((f"{name}, line {number}", line) for number, line in enumerate(lines, start=1))
    ]


def _read_bytes(file: str, name: str) -> bytes:
    if file == STDIN and sys.stdin is None:
        raise PromptError(f"{name}: expected a prompt, but it was closed; give one by --prompt or in a file")
    try:
        return sys.stdin.buffer.read() if file == STDIN else Path(file).read_bytes()
    except OSError as error:
        raise PromptError(f"{name}: cannot be read: {error.strerror}") from error


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{name}: expected UTF-8, found byte 0x{data[error.start]:02x} at byte offset {error.start} "
            f"({error.reason}); convert it to UTF-8"
        ) from error


def _checked_text(text: str, where: str) -> str:
    if not text:
        raise PromptError(f"{where}: the prompt is empty; expected at least one character")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(f"{where}: expected UTF-8, found a broken sequence at character {error.start}") from error
    return text
