"""`leafsum inspect`: what a model needs, by part and by rank, and what would travel."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ...errors import ModelError
from .options import debug_option, resolve_settings, settings_options
from .stdio import require_output, write_line

if TYPE_CHECKING:
    from ...ranks.spec import ModelSpec
    from .needs import ModelNeeds, RankNeeds

EPILOG = """\b
Examples:
  leafsum inspect --model DIR
  leafsum inspect --model DIR --tp 4 --placement strided --json

\b
Only config.json and the headers of the safetensors files are read. A model that cannot be served is refused with the
reason. Exit codes: 0 done, 2 wrong model or settings.
"""


@click.command(epilog=EPILOG)
@settings_options(("model", "tp", "placement", "dtype", "kv_tokens", "concurrency"))
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@debug_option
def inspect(as_json: bool, **flags: Any) -> None:
    """Show what a model needs, and what would travel."""
    require_output()
    settings = resolve_settings(flags)
    from ..models import resolve_model
    from .needs import inspect_model

    model_dir = resolve_model(settings.model)
    try:
        needs = inspect_model(model_dir, settings)
    except ModelError as error:
        if as_json:
            write_line(json.dumps({"supported": False, "why": str(error)}))
        raise
    if as_json:
        write_line(json.dumps(needs.to_dict()))
        return
    for line in describe(needs):
        write_line(line)


def describe(needs: ModelNeeds) -> Iterator[str]:
    """The report, line by line, in plain text."""
    yield f"{needs.spec.family}: {needs.spec.num_layers} layers: {_layers(needs)}"
    yield ", ".join(_sizes(needs.spec))
    yield f"{needs.num_files} safetensors file(s), {size(needs.file_bytes)}; model digest {needs.digest[:12]}"
    for prefix, ignored in needs.ignored.items():
        yield f"ignored: {prefix}*, {ignored.num_tensors:,} tensors, {size(ignored.num_bytes)}"
    yield ""
    yield f"parameters: {sum(needs.parameters.values()):,}"
    for part, count in needs.parameters.items():
        if count:
            yield f"  {part:17} {count:>18,}{_kept(part, needs)}"
    for rank in needs.ranks:
        yield ""
        yield from _describe_rank(rank, needs)
    yield ""
    yield from _describe_exchanges(needs)


def _layers(needs: ModelNeeds) -> str:
    names = {
        "sparse_attention": "sparse attention",
        "deltanet": "DeltaNet",
        "ngram": "with an n-gram embedding",
        "experts": "with experts",
    }
    return ", ".join(f"{len(layers)} {names.get(kind, kind)}" for kind, layers in needs.layers.items() if layers)


def _sizes(spec: ModelSpec) -> Iterator[str]:
    yield f"hidden {spec.hidden_size}" + (f" in {spec.hyper.num_streams} streams" if spec.hyper else "")
    rotated = f" ({spec.rotary_dim} rotated)" if spec.rotary_dim < spec.head_dim else ""
    yield f"{spec.num_heads} heads over {spec.num_kv_heads} KV heads of {spec.head_dim}{rotated}"
    if spec.indexer:
        indexer = spec.indexer
        blocks = f"{indexer.budget:,} keys in blocks of {indexer.block_size}"
        yield f"{indexer.num_heads} index heads of {indexer.head_dim} for {blocks}"
    if spec.deltanet:
        delta = spec.deltanet
        key_heads = f"{delta.num_key_heads} key heads of {delta.key_dim}"
        yield f"{delta.num_value_heads} DeltaNet heads of {delta.value_dim} over {key_heads}"
    shared = f" and a shared one of {spec.shared_width}" if spec.shared_width else ""
    yield f"{spec.num_experts} experts of {spec.expert_width}{shared}"
    yield f"top {spec.top_k}"
    yield f"vocabulary {spec.vocab_size:,}"
    yield f"context {spec.max_context:,}"


def _kept(part: str, needs: ModelNeeds) -> str:
    from ...ranks.footprint import MAPPED_PARTS

    if part in MAPPED_PARTS:
        return f"  mapped from the files, once for all ranks: {size(needs.mapped_bytes)}"
    if part in needs.replicated_bytes and len(needs.ranks) > 1:
        return f"  whole on every rank: {size(needs.replicated_bytes[part])}"
    return ""


def _describe_rank(rank: RankNeeds, needs: ModelNeeds) -> Iterator[str]:
    weights = ", ".join(f"{part} {size(count)}" for part, count in rank.weight_bytes.items() if count)
    shared = " and the shared one" if rank.has_shared_expert else ""
    deltanet = f", {rank.num_deltanet_heads} DeltaNet heads" if needs.spec.deltanet else ""
    yield (
        f"rank {rank.rank}: {size(rank.total_bytes)}; {rank.num_experts} experts{shared}, {rank.num_heads} heads over "
        f"{rank.num_kv_heads} KV heads{deltanet}"
    )
    yield f"  weights {size(sum(rank.weight_bytes.values()))}: {weights}"
    yield f"  KV {size(rank.kv_bytes)} ({rank.kv_bytes_per_token:,} bytes a token)"
    if rank.state_bytes:
        blocks = ", ".join(f"{block} {size(count)}" for block, count in rank.state_bytes_per_slot.items())
        yield f"  state {size(rank.state_bytes)} in {needs.num_slots} slots (each: {blocks})"


def _describe_exchanges(needs: ModelNeeds) -> Iterator[str]:
    if len(needs.ranks) == 1:
        yield "one rank: nothing travels"
        return
    replicated = needs.replicated_bytes
    yield f"whole on every rank: {size(sum(replicated.values()))} ({', '.join(replicated)})"
    for mode, cost in needs.exchanges.items():
        yield f"exchange {mode}: each rank sends at most {cost.bytes_sent_per_token:,} bytes a token"
        for name, num_rows in cost.rows.items():
            chosen = f" as {cost.modes[name]}" if mode == "auto" else ""
            yield f"  {name:9} {cost.bytes_sent[name]:>13,} ({num_rows} row(s) a layer to each peer){chosen}"


def size(num_bytes: int) -> str:
    """1,536 -> '1.5 KiB'."""
    amount = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{num_bytes} bytes" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
