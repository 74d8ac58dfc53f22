"""What a model needs and what would travel, from config.json and the safetensors headers alone: no weight is read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...collectives.placement import Placement
from ...errors import ModelError
from ...ranks.checkpoint import DTYPES, Checkpoint, Ignored
from ...ranks.configs.load import load_spec
from ...ranks.footprint import (
    BYTES,
    REPLICATED_PARTS,
    index_bytes_per_token,
    kv_bytes_per_token,
    parameter_counts,
    rank_bytes,
    rank_parameters,
    state_bytes_per_slot,
)
from ...ranks.sizes import embedding_name, expected_tensors, ignored_prefixes, table_names
from ...ranks.spec import ATTENTION, DELTANET, ModelSpec, check_num_ranks
from ..settings import Settings
from .exchange_costs import ExchangeCost, exchange_costs, expert_placement

SHOWN_FIELDS = (
    "family", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "rotary_dim", "num_experts",
    "top_k", "shared_width", "vocab_size", "max_context", "deltanet", "indexer", "hyper", "ngram",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RankNeeds:
    """What one rank holds. `parameters` and `weight_bytes` by part, without padding.

    KV bytes for one token and for --kv-tokens, index keys included; `state_bytes` by block for one slot, and for
    --concurrency slots.
    """

    rank: int
    num_heads: int
    num_kv_heads: int
    num_deltanet_heads: int
    num_experts: int
    has_shared_expert: bool
    parameters: dict[str, int]
    weight_bytes: dict[str, int]
    kv_bytes_per_token: int
    kv_bytes: int
    state_bytes_per_slot: dict[str, int]
    state_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self.weight_bytes.values()) + self.kv_bytes + self.state_bytes


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """Everything `leafsum inspect` shows. `mapped_bytes`: n-gram tables in their files, which no rank keeps."""

    spec: ModelSpec
    num_files: int
    file_bytes: int
    digest: str
    ignored: dict[str, Ignored]
    parameters: dict[str, int]
    mapped_bytes: int
    num_slots: int
    ranks: tuple[RankNeeds, ...]
    exchanges: dict[str, ExchangeCost]

    @property
    def replicated_bytes(self) -> dict[str, int]:
        """By part, the same on every rank; without heads, a rank has no indexer and fewer norms."""
        sizes = {part: max(rank.weight_bytes[part] for rank in self.ranks) for part in REPLICATED_PARTS}
        return {part: num_bytes for part, num_bytes in sizes.items() if num_bytes}

    @property
    def layers(self) -> dict[str, tuple[int, ...]]:
        """Layers by what is in them; one may stand in several places."""
        spec = self.spec
        attention = "sparse_attention" if spec.indexer else "attention"
        return {
            attention: spec.layers_of(ATTENTION),
            "deltanet": spec.layers_of(DELTANET),
            "ngram": spec.ngram.layers if spec.ngram else (),
            "experts": spec.expert_layers,
            "dense": spec.dense_layers,
        }

    def to_dict(self) -> dict[str, Any]:
        spec = asdict(self.spec)
        return {
            "supported": True,
            **{name: spec[name] for name in SHOWN_FIELDS},
            "layers": {kind: list(layers) for kind, layers in self.layers.items()},
            "files": self.num_files,
            "file_bytes": self.file_bytes,
            "model_digest": self.digest,
            "ignored": {prefix: asdict(ignored) for prefix, ignored in self.ignored.items()},
            "parameters": self.parameters | {"total": sum(self.parameters.values())},
            "replicated_bytes": self.replicated_bytes | {"total": sum(self.replicated_bytes.values())},
            "mapped_bytes": self.mapped_bytes,
            "slots": self.num_slots,
            "ranks": [asdict(rank) | {"total_bytes": rank.total_bytes} for rank in self.ranks],
            "exchanges": {
                mode: asdict(cost) | {"bytes_sent_per_token": cost.bytes_sent_per_token}
                for mode, cost in self.exchanges.items()
            },
        }


def inspect_model(model_dir: Path, settings: Settings) -> ModelNeeds:
    """Raises ModelError for a folder that cannot be served, ConfigError for more ranks than experts."""
    spec = load_spec(model_dir)
    check_num_ranks(spec, settings.tp)
    checkpoint = _open_weights(model_dir, spec)
    prefixes = ignored_prefixes(spec)
    checkpoint.check(expected_tensors(spec, checkpoint.entries), prefixes)
    experts = expert_placement(spec, settings.placement, settings.tp)
    embedding_bytes = BYTES[DTYPES[checkpoint.entries[embedding_name(spec)].dtype]]
    return ModelNeeds(
        spec=spec,
        num_files=len(checkpoint.files),
        file_bytes=sum(file.stat().st_size for file in checkpoint.files),
        digest=checkpoint.digest,
        ignored=checkpoint.ignored(prefixes),
        parameters=parameter_counts(spec),
        mapped_bytes=_mapped_bytes(spec, checkpoint),
        num_slots=settings.concurrency,
        ranks=tuple(_rank_needs(spec, settings, experts, rank, embedding_bytes) for rank in range(settings.tp)),
        exchanges=exchange_costs(spec, experts),
    )


def _open_weights(model_dir: Path, spec: ModelSpec) -> Checkpoint:
    try:
        return Checkpoint.open(model_dir)
    except ModelError as error:  # whoever asks before fetching the weights should know what was found so far
        raise ModelError(f"config.json is that of a supported {spec.family}, but {error}") from None


def _mapped_bytes(spec: ModelSpec, checkpoint: Checkpoint) -> int:
    layers = spec.ngram.layers if spec.ngram else ()
    names = [name for layer in layers for name in table_names(spec, layer, checkpoint.entries)]
    return sum(checkpoint.entries[name].num_bytes for name in names)


def _rank_needs(spec: ModelSpec, settings: Settings, experts: Placement, rank: int, embedding_bytes: int) -> RankNeeds:
    owned_ids, tp = experts.ids_of(rank), settings.tp
    kv_bytes = kv_bytes_per_token(spec, rank, tp, settings.dtype)
    kv_bytes += index_bytes_per_token(spec, rank, tp, settings.dtype)
    state_bytes = state_bytes_per_slot(spec, rank, tp, settings.dtype)
    return RankNeeds(
        rank=rank,
        num_heads=len(spec.heads(rank, tp)),
        num_kv_heads=len(spec.kv_heads(rank, tp)),
        num_deltanet_heads=len(spec.deltanet.value_heads(rank, tp)) if spec.deltanet else 0,
        num_experts=sum(id_ < spec.num_experts for id_ in owned_ids),
        has_shared_expert=spec.num_experts in owned_ids,
        parameters=rank_parameters(spec, rank, tp, owned_ids),
        weight_bytes=rank_bytes(spec, rank, tp, settings.dtype, owned_ids, embedding_bytes),
        kv_bytes_per_token=kv_bytes,
        kv_bytes=kv_bytes * settings.kv_tokens,
        state_bytes_per_slot=state_bytes,
        state_bytes=sum(state_bytes.values()) * settings.concurrency,
    )
