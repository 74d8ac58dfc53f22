"""Options that several commands share. Those of settings are made from the fields of Settings, so they cannot drift."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from ..settings import RULES, Settings, flag_of

C = TypeVar("C", bound=Callable[..., Any])


@dataclass(slots=True)
class CommandState:
    """What outlives a command's context: whether errors show their traceback."""

    debug: bool = False


def _set_debug(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        context.ensure_object(CommandState).debug = True


def debug_option(command: C) -> C:
    return click.option(
        "--debug",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=_set_debug,
        help="Show tracebacks of errors.",
    )(command)


def settings_options(names: Collection[str] = tuple(RULES)) -> Callable[[C], C]:
    """One option for every setting named. A value is passed on as it was typed: Settings reads and refuses it."""

    def decorate(command: C) -> C:
        for name in reversed([name for name, rule in RULES.items() if name in names and not rule.for_receipts]):
            command = _setting_option(name)(command)
        return command

    return decorate


def list_option(name: str, default: str, help: str) -> Callable[[C], C]:
    """A setting as a list of arms, such as --tp 1,2,3; the values are read by the setting's own rule."""
    return click.option(flag_of(name), name, metavar="A,B,...", default=default, show_default=True, help=help)


def resolve_settings(flags: Mapping[str, Any]) -> Settings:
    """Settings of this command line and this environment."""
    return Settings.resolve({name: value for name, value in flags.items() if name in RULES}, os.environ)


def _setting_option(name: str) -> Callable[[C], C]:
    rule = RULES[name]
    default = Settings.__dataclass_fields__[name].default
    if rule.kind is bool:
        flag = flag_of(name)
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=f"{rule.help} [{rule.bits}]")
    return click.option(
        flag_of(name), name, metavar=rule.metavar, default=None, help=f"{rule.help} [default: {default}; {rule.bits}]"
    )
