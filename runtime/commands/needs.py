"""What a model needs and what would travel, from config.json and the safetensors headers alone: no weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...collectives.placement import Placement
from ...collectives.tree import CanonicalTree
from ...ranks.checkpoint import DTYPES, Checkpoint
from ...ranks.sizes import (
    BYTES,
    EMBEDDING,
    REPLICATED_PARTS,
    expected_tensors,
    kv_bytes_per_token,
    parameter_counts,
    rank_bytes,
)
from ...ranks.spec import ModelSpec, check_num_ranks, load_spec
from ..settings import Settings

FP32_BYTES = BYTES["float32"]


@dataclass(frozen=True, slots=True)
class RankNeeds:
    """What one rank holds. `weight_bytes` by part, without padding; KV bytes for one token and for --kv-tokens."""

    rank: int
    num_heads: int
    num_kv_heads: int
    num_experts: int
    weight_bytes: dict[str, int]
    kv_bytes_per_token: int
    kv_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self.weight_bytes.values()) + self.kv_bytes


@dataclass(frozen=True, slots=True)
class ExchangeCost:
    """One exchange mode: padded FP32 rows a rank sends for a token in each layer; bytes over all layers and peers."""

    expert_rows: int
    attention_rows: int
    bytes_sent_per_token: int


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """Everything `leafsum inspect` shows."""

    spec: ModelSpec
    num_files: int
    file_bytes: int
    digest: str
    parameters: dict[str, int]
    ranks: tuple[RankNeeds, ...]
    exchanges: dict[str, ExchangeCost]
    auto: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        spec = self.spec
        names = ("family", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "num_experts", "top_k")
        return {
            **{name: getattr(spec, name) for name in (*names, "vocab_size", "max_context")},
            "dense_layers": list(spec.dense_layers),
            "files": self.num_files,
            "file_bytes": self.file_bytes,
            "model_digest": self.digest,
            "parameters": self.parameters | {"total": sum(self.parameters.values())},
            "replicated_parts": list(REPLICATED_PARTS),
            "ranks": [_fields(rank) | {"total_bytes": rank.total_bytes} for rank in self.ranks],
            "exchanges": {mode: _fields(cost) for mode, cost in self.exchanges.items()},
            "auto": self.auto,
        }


def inspect_model(model_dir: Path, settings: Settings) -> ModelNeeds:
    """Raises ModelError for a folder that cannot be served, ConfigError for more ranks than experts."""
    spec = load_spec(model_dir)
    check_num_ranks(spec, settings.tp)
    checkpoint = Checkpoint.open(model_dir)
    checkpoint.check(expected_tensors(spec, checkpoint.entries.keys()))
    experts = Placement.named(settings.placement, CanonicalTree(spec.num_experts), settings.tp)
    leaves = Placement.contiguous(CanonicalTree(spec.num_attention_leaves, ids_per_leaf=1), settings.tp)
    embedding_bytes = BYTES[DTYPES[checkpoint.entries[EMBEDDING].dtype]]
    expert_rows = experts.rows_per_token(spec.top_k)
    attention_rows = leaves.rows_per_token(spec.num_attention_leaves)
    return ModelNeeds(
        spec=spec,
        num_files=len(checkpoint.files),
        file_bytes=sum(file.stat().st_size for file in checkpoint.files),
        digest=checkpoint.digest,
        parameters=parameter_counts(spec),
        ranks=tuple(_rank_needs(spec, settings, experts, rank, embedding_bytes) for rank in range(settings.tp)),
        exchanges={
            mode: _exchange_cost(spec, settings.tp, expert_rows[mode], attention_rows[mode])
            for mode in ("slots", "nodes")
        },
        auto={
            "experts": experts.auto_mode(spec.top_k),
            "attention": leaves.auto_mode(spec.num_attention_leaves),
        },
    )


def _rank_needs(spec: ModelSpec, settings: Settings, experts: Placement, rank: int, embedding_bytes: int) -> RankNeeds:
    num_experts, tp = len(experts.ids_of(rank)), settings.tp
    kv_bytes = kv_bytes_per_token(spec, rank, tp, settings.dtype)
    return RankNeeds(
        rank=rank,
        num_heads=len(spec.heads(rank, tp)),
        num_kv_heads=len(spec.kv_heads(rank, tp)),
        num_experts=num_experts,
        weight_bytes=rank_bytes(spec, rank, tp, settings.dtype, num_experts, embedding_bytes),
        kv_bytes_per_token=kv_bytes,
        kv_bytes=kv_bytes * settings.kv_tokens,
    )


def _exchange_cost(spec: ModelSpec, num_ranks: int, expert_rows: int, attention_rows: int) -> ExchangeCost:
    num_rows = expert_rows * len(spec.expert_layers) + attention_rows * spec.num_layers
    return ExchangeCost(expert_rows, attention_rows, num_rows * spec.hidden_size * FP32_BYTES * (num_ranks - 1))


def _fields(value: RankNeeds | ExchangeCost) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__slots__}
