"""A run of the benchmark as a JSON document: every sample, and where it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..receipts.facts import code_facts, machine_facts, package_versions
from .aims import judged
from .options import BenchOptions
from .results import Results

FORMAT = "leafsum bench 3"
METHOD = "variants take turns in every round; one warm-up round is thrown away; spread is min to max"


def document(suites: Sequence[str], options: BenchOptions, num_rounds: int, results: Results) -> dict[str, Any]:
    """Ready for JSON; it names no user and no folder."""
    settings = options.settings
    return {
        "format": FORMAT,
        "method": METHOD,
        "suites": list(suites),
        "rounds": num_rounds,
        "work": {
            "models": [model.name for model in options.models],
            "threads": settings.threads,
            "settings": {name: getattr(settings, name) for name in ("dtype", "exchange", "placement", "transport")},
            "tp": options.rank_counts,
            "shapes": [str(shape) for shape in options.shapes],
            "rows": options.num_rows,
            "prompt_tokens": options.prompt_tokens,
            "new_tokens": options.new_tokens,
            "requests": options.num_requests,
            "long_prompt_tokens": options.long_prompt_tokens,
            "gather_bytes": options.gather_bytes,
            "gather_ranks": options.gather_ranks,
            "gather_calls": options.gather_calls,
            "wait_s": options.wait_s,
        },
        "code": code_facts(),
        "packages": package_versions() | {"transformers": _transformers_version()},
        "machine": machine_facts(),
        "measurements": [series.to_dict() for series in results.series],
        "aims": [aim.to_dict(value) for aim, value in judged(results.values)],
        "notes": results.notes,
        "failures": results.failures,
    }


def _transformers_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("transformers")
    except PackageNotFoundError:
        return "missing"
