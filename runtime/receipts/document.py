"""The receipt as a JSON document and as a table."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .receipt import HASHES, ArmResult, Difference
from .receipt_facts import code_facts, machine_facts, model_files, package_versions, write_atomically
from .sampling import Completion, SamplingParams
from ..ranks.numerics import NUMERICS_VERSION
from .settings import Settings
from .stdio import OutputError

if TYPE_CHECKING:
    from rich.table import Table

FORMAT = "leafsum receipt 1"

NOT_RUN = (
    "controls that must differ (pick order, chain of rank partials, bf16 partials, one flipped mantissa bit): not "
    "built yet, so nothing here shows that these prompts have the power to tell",
    "poison (NaN in unowned weights, free pages, padded and unused exchange rows): not built yet",
    "CUDA devices, CUDA graphs, drafts, sampling with noise: not in this version",
    "more than one machine: not in this version",
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came out: prompts that differ, and witnesses that are missing."""

    differences: tuple[Difference, ...]
    faults: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return not self.differences and not self.faults


def require_writable(path: Path) -> None:
    """Refuse, before anything runs, a file that could not be written at the end."""
    try:
        if path.exists() and not path.is_file():
            raise OSError(None, "it is no regular file")
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(descriptor)
        os.unlink(name)
    except OSError as error:
        raise ConfigError(f"--out: cannot write {path}: {error.strerror}; name a file that you may write") from error


def document(
    model: str,
    model_dir: Path,
    settings: Settings,
    sampling: SamplingParams,
    cross: str,
    results: Sequence[ArmResult],
    verdict: Verdict,
) -> dict[str, Any]:
    """The whole receipt, ready for JSON; it names no user and no folder."""
    varying = {"model", "tp", "exchange", "placement", "threads", "prefill_chunk", "concurrency", "digests"}
    return {
        "format": FORMAT,
        "equal": verdict.equal,
        "numerics": NUMERICS_VERSION,
        "settings_digest": settings.digest(),
        "settings": {name: value for name, value in settings.to_dict().items() if name not in varying},
        "sampling": {"max_tokens": sampling.max_tokens, "ignore_eos": sampling.ignore_eos},
        "cross": cross,
        "model": {"name": Path(model).name if Path(model).is_absolute() else model, "files": model_files(model_dir)},
        "code": code_facts(),
        "packages": package_versions(),
        "machine": machine_facts(),
        "prompts": [_prompt_dict(found) for found in results[0].completions],
        "reference": results[0].arm.name,
        "arms": [_arm_dict(result, verdict) for result in results],
        "differences": [difference.to_dict() for difference in verdict.differences],
        "missing_witnesses": list(verdict.faults),
        "not_run": list(NOT_RUN),
    }


def write_receipt(path: Path, receipt: dict[str, Any]) -> None:
    try:
        write_atomically(path, json.dumps(receipt, indent=1) + "\n")
    except OSError as error:
        raise OutputError(f"--out: cannot write {path}: {error.strerror}; the receipt is lost") from error


def table_rows(results: Sequence[ArmResult], verdict: Verdict) -> list[tuple[str, ...]]:
    """One row an arm: name, hash, verdict, and its witnesses."""
    return [
        (
            result.arm.name,
            result.short_hash,
            _word(result, verdict, is_reference=result is results[0]),
            f"{max(rank.exchanges for rank in result.witness.ranks):,}",
            f"{max(rank.bytes_sent for rank in result.witness.ranks):,}",
            f"{result.witness.most_rows:,}",
            f"{result.witness.most_live_requests:,}",
        )
        for result in results
    ]


COLUMNS = ("arm", "hash", "equal", "exchanges", "bytes sent per rank", "most rows", "most requests")


def plain_table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns separated by two spaces, for a pipe."""
    lines = [COLUMNS, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def rich_table(rows: Sequence[tuple[str, ...]]) -> Table:
    from rich.table import Table

    table = Table()
    for column, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if column < 3 else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _word(result: ArmResult, verdict: Verdict, *, is_reference: bool) -> str:
    if any(difference.arm == result.arm for difference in verdict.differences):
        return "DIFFERS"
    if any(fault.startswith(f"{result.arm.name}: ") for fault in verdict.faults):
        return "NO WITNESS"
    return "reference" if is_reference else "equal"


def _prompt_dict(found: Completion) -> dict[str, Any]:
    return {
        "text": found.prompt,
        "token_ids": list(found.prompt_token_ids),
        "output_token_ids": list(found.token_ids),
        "output_text": found.text,
    }


def _arm_dict(result: ArmResult, verdict: Verdict) -> dict[str, Any]:
    hashes = [
        {name: getattr(found, name) for name in HASHES}
        | {"output_tokens": len(found.token_ids), "finish_reason": found.finish_reason}
        for found in result.completions
    ]
    return {
        "name": result.arm.name,
        "settings": result.arm.to_dict(),
        "equal": not any(difference.arm == result.arm for difference in verdict.differences),
        "prompts": hashes,
        "witness": result.witness.to_dict(),
    }
