"""A model folder's chat template: jinja2 code that somebody else wrote, run in a sandbox and within bounds.

Bounded: CPU time and characters of text, looked at between pieces of text, at every call and at every turn of a loop;
the results of `*` and `**`, which can be beyond all bounds in one step; range(), by jinja2's own sandbox. Not bounded:
the memory and time of one filter or of one pass over a list that the template has built.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CPU_S = 10.0
MAX_CHARACTERS = 16 * 2**20
MAX_POWER_BITS = 4096


def render(source: str, messages: Sequence[Mapping[str, str]], special_tokens: Mapping[str, str]) -> str:
    """Text for `messages` up to where the model speaks. Raises whatever the template, jinja2 or a bound raises.

    Templates find what transformers gives them: raise_exception, strftime_now (local time, so that such a prompt
    changes with the day), tojson, break and continue, and {% generation %}.
    """
    environment = _BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlock]
    )
    environment.globals |= {"raise_exception": _raise_from_template, "strftime_now": _strftime_now}
    environment.filters["tojson"] = _tojson
    pieces, num_characters = [], 0
    template = environment.from_string(source)
    for piece in template.generate(messages=list(messages), add_generation_prompt=True, **special_tokens):
        environment.check_time()
        num_characters += len(piece)
        if num_characters > MAX_CHARACTERS:
            raise jinja2.TemplateError(f"expected at most {MAX_CHARACTERS:,} characters of text, it writes more")
        pieces.append(piece)
    return "".join(pieces)


class GenerationBlock(Extension):
    """{% generation %} marks what the model wrote, for training; for a prompt it is its body."""

    tags = {"generation"}  # noqa: RUF012 (the type is jinja2's)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The immutable sandbox with a deadline, from the moment it is made. Every loop gets a look at it as first step."""

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._deadline_s = time.thread_time() + MAX_CPU_S

    def check_time(self) -> str:
        if time.thread_time() > self._deadline_s:
            raise jinja2.TemplateError(f"expected it to end within {MAX_CPU_S:g} s of CPU time, it runs longer")
        return ""

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # jinja2's own names: a template may call with a keyword `self`
        __self.check_time()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.check_time()
        if operator == "**":
            _check_power(left, right)
        elif _repeated_length(left, right) > MAX_CHARACTERS or _repeated_length(right, left) > MAX_CHARACTERS:
            raise jinja2.TemplateError(f"expected at most {MAX_CHARACTERS:,} items from *, it asks for more")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            look = nodes.Call(nodes.EnvironmentAttribute("check_time"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(look).set_lineno(loop.lineno))
        return tree


def _check_power(base: Any, exponent: Any) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > MAX_POWER_BITS:
        raise jinja2.TemplateError(f"expected at most {MAX_POWER_BITS:,} bits from **, it asks for more")


def _repeated_length(sequence: Any, times: Any) -> int:
    is_repeated = isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int)
    return len(sequence) * times if is_repeated else 0


def _raise_from_template(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja2's own filter escapes for HTML, which no chat format expects."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
