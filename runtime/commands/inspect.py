"""`leafsum inspect`: what a model needs, by part and by rank, and what would travel."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from .options import debug_option, resolve_settings, settings_options
from .stdio import require_output, write_line

if TYPE_CHECKING:
    from .needs import ModelNeeds

EPILOG = """\b
Examples:
  leafsum inspect --model DIR
  leafsum inspect --model DIR --tp 4 --placement strided --json

\b
Only config.json and the headers of the safetensors files are read. Exit codes: 0 done, 2 wrong model or settings.
"""


@click.command(epilog=EPILOG)
@settings_options(("model", "tp", "placement", "dtype", "kv_tokens"))
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@debug_option
def inspect(as_json: bool, **flags: Any) -> None:
    """Show what a model needs, and what would travel."""
    require_output()
    settings = resolve_settings(flags)
    from ..models import resolve_model
    from .needs import inspect_model

    needs = inspect_model(resolve_model(settings.model), settings)
    if as_json:
        write_line(json.dumps(needs.to_dict()))
        return
    for line in describe(needs):
        write_line(line)


def describe(needs: ModelNeeds) -> Iterator[str]:
    """The report, line by line, in plain text."""
    spec = needs.spec
    yield (
        f"{spec.family}: {spec.num_layers} layers ({len(spec.expert_layers)} with experts), hidden {spec.hidden_size}, "
        f"{spec.num_heads} heads over {spec.num_kv_heads} KV heads of {spec.head_dim}, {spec.num_experts} experts, "
        f"top {spec.top_k}, vocabulary {spec.vocab_size:,}, context {spec.max_context:,}"
    )
    yield f"{needs.num_files} safetensors file(s), {size(needs.file_bytes)}; model digest {needs.digest[:12]}"
    yield ""
    yield f"parameters: {sum(needs.parameters.values()):,}"
    for part, count in needs.parameters.items():
        if count:
            yield f"  {part:10} {count:>18,}{_replicated(part, needs)}"
    for rank in needs.ranks:
        weights = ", ".join(f"{part} {size(count)}" for part, count in rank.weight_bytes.items() if count)
        yield ""
        yield (
            f"rank {rank.rank}: {size(rank.total_bytes)}; {rank.num_experts} experts, {rank.num_heads} heads over "
            f"{rank.num_kv_heads} KV heads"
        )
        yield f"  weights {size(sum(rank.weight_bytes.values()))}: {weights}"
        yield f"  KV {size(rank.kv_bytes)} ({rank.kv_bytes_per_token:,} bytes a token)"
    yield ""
    yield from _describe_exchanges(needs)


def _describe_exchanges(needs: ModelNeeds) -> Iterator[str]:
    if len(needs.ranks) == 1:
        yield "one rank: nothing travels"
        return
    for mode, cost in needs.exchanges.items():
        yield (
            f"exchange {mode}: each rank sends at most {cost.bytes_sent_per_token:,} bytes a token "
            f"({cost.expert_rows} rows for experts, {cost.attention_rows} for attention in a layer, to each peer)"
        )
    yield f"auto takes {needs.auto['experts']} for experts and {needs.auto['attention']} for attention"


def _replicated(part: str, needs: ModelNeeds) -> str:
    from ...ranks.sizes import REPLICATED_PARTS

    return "  whole on every rank" if part in REPLICATED_PARTS and len(needs.ranks) > 1 else ""


def size(num_bytes: int) -> str:
    """1,536 -> '1.5 KiB'."""
    amount = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{num_bytes} bytes" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
