"""The rerun of a receipt: what of it is the same here, then its prompts once more, and the first difference."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...errors import ConfigError, ReceiptMismatch
from .. import models
from ..receipts.arms import ARM_FIELDS, Arm, Axes, default_concurrency
from ..receipts.document import difference_record
from ..receipts.file import read_text
from ..receipts.here import (
    TEXTS_NOT_CHECKED,
    Fact,
    facts_here,
    require_same,
    require_same_texts,
    texts_can_be_checked,
)
from ..receipts.recorded import reference_result, require_consistent, require_whole_reference
from ..receipts.records import Receipt
from ..receipts.run import ArmResult, Runner
from ..receipts.seal import from_text
from ..receipts.table import table_rows
from ..receipts.verdict import Verdict
from ..sampling import SamplingParams
from ..settings import Settings
from ..tokenizer import Tokenizer
from .arm_table import show_table
from .complete import prompt_ids
from .options import resolve_settings
from .progress import Display
from .prompts import PromptSource
from .stdio import printable, show_log, write_line

DEFAULT_CONCURRENCY = (4,)

FEWEST_RANKS = 2
"""One rank exchanges nothing, so a rerun on one would show the least."""


def rerun(path: Path, model: str | None, tp: str | None, as_json: bool, flags: dict[str, Any]) -> None:
    """What `leafsum verify` does. Raises ConfigError for what cannot be run, ReceiptMismatch for what is not equal."""
    receipt = from_text(read_text(path), str(path))
    require_consistent(receipt)
    require_whole_reference(receipt)
    lists = {name: flags.pop(name) for name in ARM_FIELDS if name != "tp"}
    num_prompts = len(receipt.prompts)
    lists["concurrency"] = lists["concurrency"] or default_concurrency(DEFAULT_CONCURRENCY, num_prompts)
    axes = Axes.parse({**lists, "tp": tp or str(default_tp(receipt))})
    axes.require_prompts(num_prompts)
    arms = axes.adverse_arms()
    settings = settings_of(receipt, path, {**flags, "model": model or model_of(receipt, path)})
    show_log(settings.log_level)
    with Display() as display:
        display.stage("hashing the model's files")
        model_dir = models.resolve_model(settings.model)
        facts = facts_here(receipt, settings, model_dir)
    tokenizer = Tokenizer.open(model_dir) if texts_can_be_checked(receipt, model_dir) else None
    if tokenizer is None:
        receipt = msgspec.structs.replace(receipt, not_shown=(*receipt.not_shown, TEXTS_NOT_CHECKED))
    if not as_json:
        show_facts(receipt, facts)
    try:
        require_same(facts)
        if tokenizer is not None:
            require_same_texts(receipt, tokenizer)
    except ReceiptMismatch:
        if as_json:
            write_line(json.dumps(outcome(receipt, facts, Verdict((), (), ()), [])))
        raise
    sources = [PromptSource(None, prompt.token_ids, str(path)) for prompt in receipt.prompts]
    prompts = prompt_ids(settings, sources, receipt.sampling.max_tokens)
    rerun_and_compare(receipt, settings, arms, prompts, facts, as_json)


def rerun_and_compare(
    receipt: Receipt,
    settings: Settings,
    arms: Sequence[Arm],
    prompts: Sequence[tuple[int, ...]],
    facts: Sequence[Fact],
    as_json: bool,
) -> None:
    """ReceiptMismatch with the first difference from the receipt's reference, or with what failed."""
    sampling = SamplingParams(max_tokens=receipt.sampling.max_tokens, ignore_eos=receipt.sampling.ignore_eos)
    with Display() as display:
        runner = Runner(settings, prompts, sampling, display.stage, display.on_progress)
        results = list(runner.run_arms(arms))
    verdict = Verdict.of(reference_result(receipt), results)
    if as_json:
        write_line(json.dumps(outcome(receipt, facts, verdict, results)))
    else:
        show_table(table_rows(results, verdict, has_reference=False))
        line = f"{len(results)} arms, {len(prompts)} prompts, compared with the receipt: {verdict.summary}"
        write_line(printable("; ".join([line, *(not_shown_line(text) for text in receipt.not_shown)])))
    verdict.require_equal()
    if not receipt.equal:
        raise ReceiptMismatch(
            "the rerun is equal to the receipt's reference arm, but by its own account the receipt is not equal: "
            f"{next(_reasons(receipt), 'it does not say why')}"
        )


def _reasons(receipt: Receipt) -> Iterator[str]:
    yield from (*receipt.failed, *(difference.text for difference in receipt.differences), *receipt.faults)


def settings_of(receipt: Receipt, path: Path, flags: dict[str, Any]) -> Settings:
    """The receipt's settings, and those of this command line before them."""
    given = {name: value for name, value in flags.items() if value is not None}
    resolve_settings(given)  # what is wrong with these is not the receipt's fault
    try:
        return resolve_settings({**msgspec.to_builtins(receipt.settings), **given})
    except ConfigError as error:
        raise ConfigError(f"{path}: its settings cannot be had here: {error}") from error


def default_tp(receipt: Receipt) -> int:
    num_cores = len(os.sched_getaffinity(0))
    return max((FEWEST_RANKS, *(arm.settings.tp for arm in receipt.arms if arm.settings.tp <= num_cores)))


def model_of(receipt: Receipt, path: Path) -> str:
    """What --model would say. ConfigError where the receipt knows a folder's name only."""
    name = receipt.model.name
    if name == models.TINY or models.HUB_ID.fullmatch(name):
        return name
    raise ConfigError(f"{path} was made from the local model folder {name!r}; say where it is here with --model DIR")


def show_facts(receipt: Receipt, facts: Sequence[Fact]) -> None:
    """What the receipt is, and what of it is the same here."""
    num_prompts, num_arms = len(receipt.prompts), len(receipt.arms)
    verdict = "all equal" if receipt.equal else "NOT equal by its own account"
    lines = [
        f"receipt: {receipt.model.name}, {num_arms} arms, {num_prompts} prompts, {verdict}; leafsum "
        f"{receipt.code.get('version')}, commit {receipt.code.get('commit')}"
    ]
    lines += [f"{'same ' if fact.same else 'OTHER'}  {fact.what}: {fact.text}" for fact in facts]
    lines += [not_shown_line(text) for text in receipt.not_shown]
    for line in lines:
        write_line(printable(line))


def not_shown_line(text: str) -> str:
    return f"not shown: {text}"


def outcome(receipt: Receipt, facts: Sequence[Fact], verdict: Verdict, results: Sequence[ArmResult]) -> dict[str, Any]:
    """The object of --json; without results, nothing ran."""
    return {
        "equal": bool(results) and verdict.equal,
        "receipt_is_equal": receipt.equal,
        "receipt_not_shown": list(receipt.not_shown),
        "facts": [fact.to_dict() for fact in facts],
        "arms": [
            {"name": result.arm.name, "equal": verdict.is_equal(result.arm), "hashes_sha256": result.hashes_sha256}
            for result in results
        ],
        "differences": [msgspec.to_builtins(difference_record(each)) for each in verdict.differences],
        "failed": [str(failure) for failure in verdict.failures],
        "faults": [str(fault) for fault in verdict.faults],
    }
