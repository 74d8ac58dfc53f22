"""`leafsum receipt`: the equality matrix, as a table and as a JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from .. import models
from ..receipts.arms import ARM_FIELDS, NOT_ASKED, Axes, default_concurrency
from ..receipts.controls import ControlOutcome, ControlPlan, flipped_layer
from ..receipts.file import require_writable, write_receipt
from ..receipts.hashes import SHOWN_DIGITS
from ..receipts.hazards import HazardReport
from ..receipts.prompts import BUILT_IN_PROMPTS
from ..receipts.run import ArmResult, Runner
from ..receipts.table import table_rows
from ..receipts.verdict import Power, Verdict
from ..sampling import SamplingParams
from ..settings import RULES, Settings
from .arm_table import show_table
from .complete import as_given, prompt_ids
from .options import debug_option, list_option, resolve_settings, settings_options
from .progress import Display
from .prompts import PromptSource, gather_prompts
from .stdio import printable, require_output, show_log, write_line

DEFAULT_CONCURRENCY = (4, 1)

BUILT_IN = "built-in"
"""Where a built-in prompt comes from, as PromptSource says it."""

EPILOG = """\b
Examples:
  leafsum receipt --model tiny --tp 1,2,3
  leafsum receipt --model DIR --tp 1,2,4 --exchange slots,nodes --placement contiguous,strided,random:7 \\
      --prefill-chunk 1,5,64,whole --concurrency 1,4 --cross full --out receipt.json

\b
The first value of every list is its default, and all first values together are the reference arm, which runs plainly.
All others run with NaN in all memory that must not be read, random delays in every rank, and shuffled prompts. For the
NaN every rank allocates all experts, those that it does not own too: tp ranks need tp times the memory of the experts.
--cross cheap runs every tp x exchange x placement with the first of all else, and at each tp every chunk x concurrency,
every thread count and every transport, with the first of all else; --cross full runs every combination.


Equal means: token_sha256, logits_sha256 (every decided row, whole vocabulary), residual_hash and the hash of every row
after every layer are the reference's, for every prompt. An arm whose counts do not show that it ran as named, or one
with a failed prompt, fails the receipt too. Controls, sums that are wrong on purpose, must differ for every prompt; a
receipt in which one does not differ fails, since its prompts have not the power to tell.


leafsum verify runs a receipt again, here or elsewhere. Exit codes: 0 equal, 1 a difference or a failed run, 2 wrong
use.
"""


@click.command(epilog=EPILOG)
@list_option("tp", "1,2", "Rank counts.")
@list_option("exchange", "slots,nodes", "Exchanges; none at tp 1.")
@list_option("placement", "contiguous,strided,random", "Placements of experts; none at tp 1.")
@list_option("transport", "shared", "Transports; none at tp 1.")
@list_option("prefill_chunk", "whole,5", "Most prompt tokens in one step.")
@click.option(
    "--concurrency",
    default=None,
    metavar="A,B,...",
    help="Most requests at once, at most one a prompt. [default: 4,1, or a request a prompt]",
)
@list_option("threads", "1", "Compute threads of a rank.")
@click.option(
    "--cross", type=click.Choice(["cheap", "full"]), default="cheap", show_default=True, help="How lists are crossed."
)
@click.option(
    "--prompt", "texts", multiple=True, metavar="TEXT", help="A prompt; repeatable. Without any: eight built-in ones."
)
@click.option(
    "--prompt-file", "files", multiple=True, metavar="FILE", help="A UTF-8 file as one prompt, - for standard input."
)
@click.option("--prompt-ids", "ids_texts", multiple=True, metavar="1,2,3", help="A prompt as token ids; repeatable.")
@click.option(
    "--max-tokens", type=int, default=64, show_default=True, metavar="N", help="Most tokens to write per prompt."
)
@click.option(
    "--ignore-eos/--stop-at-eos", default=True, show_default=True, help="Write --max-tokens tokens in any case."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=None,
    metavar="FILE",
    help="Also write the receipt, as JSON, here.",
)
@click.option("--no-controls", is_flag=True, help="Leave out the runs that must differ; power is then not shown.")
@click.option("--json", "as_json", is_flag=True, help="The receipt as JSON on standard output, instead of the table.")
@settings_options([name for name in RULES if name not in (*ARM_FIELDS, *NOT_ASKED)])
@debug_option
def receipt(
    cross: str,
    texts: tuple[str, ...],
    files: tuple[str, ...],
    ids_texts: tuple[str, ...],
    max_tokens: int,
    ignore_eos: bool,
    out: Path | None,
    no_controls: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Compare all hashes under settings that keep bits.

    The same prompts are served by every arm: every crossing of the lists below.
    """
    require_output()
    prompts = _prompts(texts, files, ids_texts)
    lists = {name: flags.pop(name) for name in ARM_FIELDS}
    lists["concurrency"] = lists["concurrency"] or default_concurrency(DEFAULT_CONCURRENCY, len(prompts))
    axes = Axes.parse(lists)
    axes.require_prompts(len(prompts))
    arms = axes.arms(cross)
    settings = resolve_settings(flags)
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
    if out is not None:
        require_writable(out)
    show_log(settings.log_level)
    from ...ranks.configs.load import load_spec
    from ..receipts.document import receipt_of
    from ..receipts.seal import to_document, to_text

    model_dir = models.resolve_model(settings.model)
    spec = load_spec(model_dir)
    top_k = spec.top_k if spec.expert_layers else 0
    controls = ControlPlan.left_out() if no_controls else ControlPlan.of(arms, top_k)
    with Display() as display:
        display.stage("reading prompts")
        ids = prompt_ids(settings, prompts, max_tokens)
        runner = Runner(settings, ids, sampling, display.stage, display.on_progress)
        results = [_as_given(result, prompts) for result in runner.run_arms(arms)]
        layer = flipped_layer(spec.expert_layers)
        outcomes = [ControlOutcome.of(results[0], runner.run_control(arm), layer) for arm in controls.arms]
        display.stage("hashing the model's files")
        # The built-in prompts of tiny meet every hazard; the weights and prompts of users may hold none.
        must_meet_hazards = settings.model == models.TINY and prompts[0].where == BUILT_IN
        power = Power(tuple(outcomes), controls.not_run, HazardReport.of(results), must_meet_hazards)
        verdict = Verdict.of(results[0], results[1:], power)
        found = to_document(receipt_of(model_dir, settings, sampling, cross, results, verdict, power))
    if out is not None:
        write_receipt(out, to_text(found))
    if as_json:
        write_line(json.dumps(found))
    else:
        show(results, verdict, power, settings, out)
    verdict.require_equal()


def show(results: Sequence[ArmResult], verdict: Verdict, power: Power, settings: Settings, out: Path | None) -> None:
    """The table, a line for each control, and one that sums it up."""
    show_table(table_rows(results, verdict))
    for outcome in power.controls:
        write_line(printable(outcome.line))
    num_prompts = len(results[0].completions)
    write_line(
        f"{len(results)} arms, {num_prompts} prompts, settings {settings.digest()[:SHOWN_DIGITS]}: {verdict.summary}; "
        f"{power.summary}"
    )
    if out is not None:
        write_line(f"receipt: {out}")


def _as_given(result: ArmResult, prompts: Sequence[PromptSource]) -> ArmResult:
    return replace(result, completions=tuple(as_given(result.completions, prompts)))


def _prompts(texts: tuple[str, ...], files: tuple[str, ...], ids_texts: tuple[str, ...]) -> list[PromptSource]:
    if not (texts or files or ids_texts):
        return [PromptSource(text, None, BUILT_IN) for text in BUILT_IN_PROMPTS]
    return gather_prompts(texts, files, ids_texts)
