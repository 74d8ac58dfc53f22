"""The commands of `leafsum`, as one group. Nothing slow is imported here: a command imports what it needs itself."""

from __future__ import annotations

import click

from .bench import bench
from .demo import demo
from .doctor import doctor
from .generate import generate
from .inspect import inspect
from .options import debug_option
from .receipt import receipt
from .verify import verify

EPILOG = """\b
Examples:
  leafsum demo                                   one prompt at tp 1 and 2, and equal hashes
  leafsum generate --model tiny --tp 2 --prompt "Once upon a time"
  leafsum receipt --model tiny --tp 1,2,3        the equality matrix
  leafsum verify receipt.json                    the same bits here?
  leafsum inspect --model DIR --tp 4             what a model needs, and what would travel
  leafsum doctor                                 what this machine has
  leafsum bench                                  how fast it is, and how fast it could be

\b
Every setting is a flag, a LEAFSUM_* variable (--kv-tokens is LEAFSUM_KV_TOKENS) and an argument of WorkerPool.
"""


def _print_version(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        click.echo(f"leafsum {version('leafsum')}")
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}, epilog=EPILOG)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version, help="Show the version."
)
@debug_option
def command_line() -> None:
    """Mixture-of-experts language models on several ranks: the same tokens, byte for byte, at any number of them."""


for _command in (demo, generate, receipt, verify, inspect, doctor, bench):
    command_line.add_command(_command)
