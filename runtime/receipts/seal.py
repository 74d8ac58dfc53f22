"""A receipt as sealed JSON text: an arm or a prompt on one line, so that two versions of a file compare well.

The seal tells an edited or damaged file from a whole one. It is no signature: whoever edits can seal again, and what
then still tells is a rerun (`leafsum verify`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...errors import ConfigError, ReceiptMismatch
from .document import FORMAT
from .records import Receipt

SEAL = "seal"

NESTED_LINES = 2
"""Levels of the document whose entries have lines of their own."""


def to_document(receipt: Receipt) -> dict[str, Any]:
    """The JSON object, its seal last."""
    document: dict[str, Any] = msgspec.to_builtins(receipt)
    return {**document, SEAL: seal_of(document)}


def to_text(document: Mapping[str, Any]) -> str:
    return _layout(document, NESTED_LINES, "") + "\n"


def from_text(text: str, where: str) -> Receipt:
    """The receipt in `text`. `where` names it in errors.

    Raises ConfigError for what is no receipt of this version, ReceiptMismatch for one that was edited.
    """
    document = _document(text, where)
    found = document.get("format")
    if found != FORMAT:
        raise ConfigError(f"{where}: expected a receipt (format {FORMAT!r}), found format {found!r}; make it again")
    seal = document.pop(SEAL, None)
    expected = seal_of(document)
    if seal != expected:
        raise ReceiptMismatch(
            f"{where} was edited after it was written: its seal is {seal}, its contents make {expected}; fetch or make "
            "it again"
        )
    try:
        return msgspec.convert(document, Receipt)
    except ValueError as error:  # a wrong type or range; the text says where
        raise ConfigError(f"{where}: no receipt that this version reads: {error}; make it again") from error


def seal_of(document: Mapping[str, Any]) -> str:
    """SHA-256 (hex) over everything but the seal: names sorted, no spaces, ASCII."""
    contents = {name: value for name, value in document.items() if name != SEAL}
    return hashlib.sha256(json.dumps(contents, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _document(text: str, where: str) -> dict[str, Any]:
    try:
        document = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: expected a receipt in JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{where}: expected a receipt, an object in JSON, found {type(document).__name__}")
    return document


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A name that stands twice could show a reader what the seal does not cover."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return found


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _layout(value: Any, levels: int, indent: str) -> str:
    if levels == 0 or not value or not isinstance(value, Mapping | list | tuple):
        return json.dumps(value, separators=(",", ":"))
    inner = indent + " "
    if isinstance(value, Mapping):
        lines = [f"{inner}{json.dumps(name)}: {_layout(each, levels - 1, inner)}" for name, each in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _layout(each, levels - 1, inner) for each in value) + f"\n{indent}]"
