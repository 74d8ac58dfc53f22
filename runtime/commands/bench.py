"""`leafsum bench`: how fast this machine is, against what it could be."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ...errors import ConfigError, LeafsumError
from ..bench.options import FAMILIES, SUITES, BenchModel, BenchOptions, Shape, parse_counts
from .options import debug_option, resolve_settings, settings_options
from .progress import Display
from .stdio import on_terminal, require_output, write_line

if TYPE_CHECKING:
    from ..bench.results import Results

C = TypeVar("C", bound=Callable[..., Any])

BENCH_SETTINGS = ("dtype", "exchange", "placement", "transport")
MOST_RANKS = 64
MOST_REQUESTS = 4096
MOST = 1_000_000
"""Of what is counted: rounds, tokens, rows, calls. More is a slip of the keyboard, or fits no memory."""

MOST_GATHER_BYTES = 1 << 28
"""A rank holds the parts of all: 2 GiB at 8 ranks."""

EPILOG = """\b
Suites (none named: all of them, in about four minutes on two idle cores):
  kernels    One thread. Ways to read memory in GB/s; linear at 1 row (bfloat16 weights that no cache holds) in GB/s of
             weights, to be held against the fastest of those ways; linear at --rows rows in GFLOP/s beside torch's
             float32 matmul; kernels of Flash Next's blocks at its own sizes, deltanet at 1 row also in GB/s of state.
  decode     Tokens a second after the first, of one greedy request (--prompt-tokens, --new-tokens) and of --requests
             at once with half of the new tokens each, at every --tp and of transformers on the same weights with
             --threads threads, in the way that was fastest in a trial (float32 or bfloat16, either expert code).
             "% in exchanges" is the time that a rank spends on what is done only because there are others (choosing
             rows, gathering them, adding what came, and waiting), of the steps after the first token; "% in transport
             calls" is the part of it that moves bytes and waits. With --threads 1 and a core for every rank they are
             what several ranks cost. "CPU, rank outside kernels" is what else a rank's process computes with all its
             threads: Python, messages, moving bytes; a wait is none of it. "program" is this command, which draws
             its progress on a terminal and nothing in a pipe.
  prompt     Prompt tokens a second up to the first new token, of one request of --long-prompt-tokens.
  waiting    CPU time a second of pools of the model tiny, at every --tp (the model does not matter): one that
             is idle, and one whose last rank is stopped in the middle of a decode step. 10 ms/s are 1 % of a core.
             "rank" is the one that used most.
  transport  One all-gather of --gather-bytes a rank, as rank 0 sees it, --gather-calls of them one after the other:
             shared memory beside Gloo at every --gather-ranks. More ranks than cores wait for the scheduler, too.
  startup    From the start of a process: to the first character of text that demo writes, to its end, and to the end
             of --help.

\b
How to read it: variants take turns in every round (A B A B), so that drift meets all alike, after one warm-up round
that is thrown away. Every line has the median of --rounds samples, and the least and greatest of them: where two
lines overlap, their order says nothing. An aim says pass or miss of the medians; it is an aim, not a test, and the
exit code does not depend on it. Nothing else should run on the machine.

\b
Models: without --model, decode and prompt measure two, one after the other: qwen3_moe (206 MB) and qwen4_exp (Flash
Next, 153 MB), random bfloat16 weights, made once in the user's cache folder. --family takes one of them. A model of
another family is measured, and has no aims. transformers chooses keys of qwen4_exp in a loop over a prompt's rows.

\b
Examples:
  leafsum bench
  leafsum bench kernels --shape 2048x768 --shape 768x2048 --rounds 9
  leafsum bench decode prompt --tp 1,2,4 --model DIR
  leafsum bench decode --family qwen4_exp --requests 8
  leafsum bench transport --gather-bytes 65536 --gather-ranks 2,3 --json > transport.json

\b
--json prints one document: every sample, versions, machine, aims. Exit codes: 0 measured, 1 a suite failed, 2 wrong
use.
"""


def _size_option(flag: str, default: int, help: str, *, least: int = 1, most: int = MOST) -> Callable[[C], C]:
    sizes = click.IntRange(least, most)
    return click.option(flag, type=sizes, default=default, show_default=True, metavar="N", help=help)


@click.command(epilog=EPILOG)
@click.argument("suites", nargs=-1, type=click.Choice(SUITES), metavar="[SUITE]...")
@_size_option("--rounds", 3, "Samples of every variant.")
@click.option("--tp", default="1,2", show_default=True, metavar="A,B,...", help="Rank counts; aims take the first.")
@_size_option("--threads", 1, "Compute threads of a rank, and of transformers.")
@click.option("--model", default=None, metavar="DIR|tiny|HUB-ID", help="Measure this model. [default: made for it]")
@click.option(
    "--family", "families", multiple=True, type=click.Choice(FAMILIES), help="Of those made for it; repeatable."
)
@click.option("--transformers/--no-transformers", default=True, show_default=True, help="Compare with transformers.")
@_size_option("--prompt-tokens", 128, "Prompt of decode.")
@_size_option("--new-tokens", 64, "Output of decode.", least=2)
@_size_option("--requests", 4, "Requests at once in decode's second work; 1: none.", most=MOST_REQUESTS)
@_size_option("--long-prompt-tokens", 512, "Prompt of prompt.")
@click.option(
    "--shape", "shapes", multiple=True, metavar="INxOUT", help="Linear layer; repeatable. [default: 2560x12288]"
)
@_size_option("--rows", 256, "Rows where linear meets torch.")
@_size_option("--gather-bytes", 10240, "Bytes that each rank gives.", most=MOST_GATHER_BYTES)
@click.option("--gather-ranks", default="2,4,8", show_default=True, metavar="A,B,...", help="Rank counts of transport.")
@_size_option("--gather-calls", 300, "Calls in one round.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output, instead of the tables.")
@settings_options(BENCH_SETTINGS)
@debug_option
def bench(suites: tuple[str, ...], rounds: int, as_json: bool, **flags: Any) -> None:
    """Measure speed, and what it could be."""
    require_output()
    chosen = [suite for suite in SUITES if suite in suites or not suites]
    options = bench_options(flags)
    from ..bench.document import document
    from ..bench.rounds import Rounds
    from ..bench.run import run_suites

    with Display() as display:
        results = run_suites(chosen, options, Rounds(rounds, display.stage))
    found = document(chosen, options, rounds, results)
    if as_json:
        write_line(json.dumps(found))
    else:
        show(found, results)
    if results.failures:
        from ..bench.table import failures

        raise LeafsumError("; ".join(failures(results)))


def bench_options(flags: dict[str, Any]) -> BenchOptions:
    """Raises ConfigError and ModelError before anything is measured."""
    rank_counts = parse_counts(flags["tp"], "--tp", MOST_RANKS)
    threads = {"threads": str(flags["threads"])}
    settings = resolve_settings({name: flags[name] for name in BENCH_SETTINGS} | threads)
    return BenchOptions(
        settings=settings,
        models=_models(flags["model"], flags["families"]),
        shapes=tuple(Shape.parse(text) for text in flags["shapes"] or ("2560x12288",)),
        num_rows=flags["rows"],
        rank_counts=rank_counts,
        with_transformers=flags["transformers"],
        prompt_tokens=flags["prompt_tokens"],
        new_tokens=flags["new_tokens"],
        num_requests=flags["requests"],
        long_prompt_tokens=flags["long_prompt_tokens"],
        gather_bytes=flags["gather_bytes"],
        gather_ranks=parse_counts(flags["gather_ranks"], "--gather-ranks", MOST_RANKS),
        gather_calls=flags["gather_calls"],
    )


def _models(model: str | None, families: tuple[str, ...]) -> tuple[BenchModel, ...]:
    from ..models import model_name, resolve_model

    if model is None:
        return tuple(BenchModel(family) for family in FAMILIES if family in families or not families)
    if families:
        raise ConfigError(
            "--family: expected no --model beside it (it is one of the models made for bench), found both"
        )
    model_dir = resolve_model(model)
    return (BenchModel(model_name(model, model_dir), model_dir),)


def show(found: dict[str, Any], results: Results) -> None:
    """Where it was measured, both tables, and the notes."""
    from ..bench.table import aims, heading, measured

    write_line(heading(found))
    for columns in (measured(results), aims(results)):
        write_line("")
        if on_terminal():
            from rich.console import Console

            Console().print(columns.rich())
        else:
            for line in columns.plain():
                write_line(line)
    for note in results.notes:
        write_line(f"note: {note}")
