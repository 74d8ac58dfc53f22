"""The receipt as a JSON document; it names no user and no folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...ranks.numerics import NUMERICS_VERSION
from ..models import model_name
from ..sampling import Completion, SamplingParams
from ..settings import Settings
from .facts import code_facts, machine_facts, package_versions
from .hashes import model_files
from .run import HASHES, ArmResult
from .verdict import Verdict

FORMAT = "leafsum receipt 1"

NOT_RUN = (
    "controls that must differ (pick order, chain of rank partials, bf16 partials, one flipped mantissa bit): not "
    "built yet, so nothing here shows that these prompts have the power to tell",
    "poison (NaN in unowned weights, free pages, padded and unused exchange rows): not built yet",
    "CUDA devices, CUDA graphs, drafts, sampling with noise: not in this version",
    "more than one machine: not in this version",
)


def document(
    model_dir: Path,
    settings: Settings,
    sampling: SamplingParams,
    cross: str,
    results: Sequence[ArmResult],
    verdict: Verdict,
) -> dict[str, Any]:
    """The whole receipt, ready for JSON. `model_dir`: what settings.model led to."""
    varying = {"model", "tp", "exchange", "placement", "threads", "prefill_chunk", "concurrency", "digests"}
    return {
        "format": FORMAT,
        "equal": verdict.equal,
        "numerics": NUMERICS_VERSION,
        "settings_digest": settings.digest(),
        "settings": {name: value for name, value in settings.to_dict().items() if name not in varying},
        "sampling": {"max_tokens": sampling.max_tokens, "ignore_eos": sampling.ignore_eos},
        "cross": cross,
        "model": {"name": model_name(settings.model, model_dir), "files": model_files(model_dir)},
        "code": code_facts(),
        "packages": package_versions(),
        "machine": machine_facts(),
        "prompts": [_prompt_dict(found) for found in results[0].completions],
        "reference": results[0].arm.name,
        "arms": [_arm_dict(result, verdict) for result in results],
        "differences": [difference.to_dict() for difference in verdict.differences],
        "failed": [str(failure) for failure in verdict.failures],
        "missing_witnesses": [str(fault) for fault in verdict.faults],
        "not_run": list(NOT_RUN),
    }


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
        | ({"error": found.error} if found.error else {})
        for found in result.completions
    ]
    return {
        "name": result.arm.name,
        "settings": result.arm.to_dict(),
        "equal": verdict.word_of(result.arm) not in ("FAILED", "DIFFERS"),
        "prompts": hashes,
        "witness": asdict(result.witness),
    }
