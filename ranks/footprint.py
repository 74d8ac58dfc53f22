"""What a model comes to: parameters by part; bytes of weights, of keys and values, and of state that a rank keeps.

Imports no torch. Nothing here counts the padding of kernels or the buffers of a step.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .ngram_tables import padded_rows
from .spec import ATTENTION, DELTANET, DELTANET_RING_ROWS, NUM_BORDER_STATES, ModelSpec, num_ring_rows

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FP32_BYTES = BYTES["float32"]
TOKEN_BYTES = 8

REPLICATED_PARTS = ("embedding", "router", "dense", "indexer", "hyper_connections", "ngram", "norms")
"""Parts that every rank holds whole (the indexer and norms of heads: every rank with heads). Heads and vocabulary rows
are split, experts are placed."""
MAPPED_PARTS = ("ngram_table",)
"""Parts that no rank holds: the file is mapped into memory, once for all ranks, and the rows asked for are read."""


@dataclass(frozen=True, slots=True)
class Count:
    """Parameters of one part: `linear` in the compute dtype (an embedding or table: as stored), `fp32` always wide."""

    linear: int = 0
    fp32: int = 0

    @property
    def total(self) -> int:
        return self.linear + self.fp32


@dataclass(frozen=True, slots=True)
class Share:
    """How much of the split parts one holds."""

    num_heads: int
    num_kv_heads: int
    num_key_heads: int
    num_value_heads: int
    num_experts: int
    num_shared_experts: int
    vocab_rows: int

    @classmethod
    def whole(cls, spec: ModelSpec) -> Share:
        delta = spec.deltanet
        key_heads, value_heads = (delta.num_key_heads, delta.num_value_heads) if delta else (0, 0)
        has_shared = spec.shared_width > 0
        return cls(
            spec.num_heads, spec.num_kv_heads, key_heads, value_heads, spec.num_experts, has_shared, spec.vocab_size
        )

    @classmethod
    def of_rank(cls, spec: ModelSpec, rank: int, num_ranks: int, owned_ids: Collection[int]) -> Share:
        delta = spec.deltanet
        first, stop = spec.vocab_range(rank, num_ranks)
        return cls(
            num_heads=len(spec.heads(rank, num_ranks)),
            num_kv_heads=len(spec.kv_heads(rank, num_ranks)),
            num_key_heads=len(delta.key_heads(rank, num_ranks)) if delta else 0,
            num_value_heads=len(delta.value_heads(rank, num_ranks)) if delta else 0,
            num_experts=sum(id_ < spec.num_experts for id_ in owned_ids),
            num_shared_experts=sum(id_ >= spec.num_experts for id_ in owned_ids),
            vocab_rows=stop - first,
        )


def parameter_counts(spec: ModelSpec) -> dict[str, int]:
    """Parameters of the whole model by part; a tied head counts none."""
    counts = {part: count.total for part, count in _counts(spec, Share.whole(spec)).items()}
    return counts | {"head": 0 if spec.tied_embeddings else counts["head"]}


def rank_parameters(spec: ModelSpec, rank: int, num_ranks: int, owned_ids: Collection[int]) -> dict[str, int]:
    """Parameters that one rank keeps, by part, without mapped parts; a tied head is kept a second time.

    `owned_ids`: placement.ids_of(rank), a shared expert's among them.
    """
    counts = _counts(spec, Share.of_rank(spec, rank, num_ranks, owned_ids))
    return {part: count.total for part, count in counts.items() if part not in MAPPED_PARTS}


def rank_bytes(
    spec: ModelSpec, rank: int, num_ranks: int, dtype: str, owned_ids: Collection[int], embedding_bytes_per_value: int
) -> dict[str, int]:
    """Bytes of what `rank_parameters` counts.

    Linears are in the compute dtype, the embedding as stored, norms, biases and convolutions in FP32.
    """
    counts = _counts(spec, Share.of_rank(spec, rank, num_ranks, owned_ids))
    width = {"embedding": embedding_bytes_per_value}
    return {
        part: count.linear * width.get(part, BYTES[dtype]) + count.fp32 * FP32_BYTES
        for part, count in counts.items()
        if part not in MAPPED_PARTS
    }


def kv_bytes_per_token(spec: ModelSpec, rank: int, num_ranks: int, dtype: str) -> int:
    """Bytes of keys and values that one position takes on one rank, all layers together."""
    num_values = 2 * len(spec.kv_heads(rank, num_ranks)) * spec.head_dim
    return len(spec.layers_of(ATTENTION)) * num_values * BYTES[dtype]


def index_bytes_per_token(spec: ModelSpec, rank: int, num_ranks: int, dtype: str) -> int:
    """Bytes of index keys that one position takes on one rank, all layers together: its part of a block's, upward."""
    if spec.indexer is None or not spec.heads(rank, num_ranks):
        return 0
    return -(-len(spec.layers_of(ATTENTION)) * spec.indexer.head_dim * BYTES[dtype] // spec.indexer.block_size)


def state_bytes_per_slot(spec: ModelSpec, rank: int, num_ranks: int, dtype: str) -> dict[str, int]:
    """Bytes that one request takes on one rank beside its keys and values, by block, however long it is."""
    parts = {}
    if spec.deltanet is not None:
        parts["deltanet"] = len(spec.layers_of(DELTANET)) * _deltanet_state(spec, rank, num_ranks, dtype)
    if spec.indexer is not None and spec.heads(rank, num_ranks):
        ring = num_ring_rows(spec.indexer.block_size) * spec.indexer.head_dim * FP32_BYTES
        parts["indexer"] = len(spec.layers_of(ATTENTION)) * ring
    if spec.ngram is not None:
        ring = num_ring_rows(spec.ngram.conv_reach) * spec.residual_size * FP32_BYTES
        parts["ngram"] = len(spec.ngram.layers) * (ring + num_ring_rows(spec.ngram.ngram_size) * TOKEN_BYTES)
    return parts


def _deltanet_state(spec: ModelSpec, rank: int, num_ranks: int, dtype: str) -> int:
    delta = spec.deltanet
    assert delta is not None
    num_key_heads = len(delta.key_heads(rank, num_ranks))
    num_heads = len(delta.value_heads(rank, num_ranks))
    value_width = num_heads * delta.value_dim
    states = NUM_BORDER_STATES * value_width * delta.key_dim
    num_rows = DELTANET_RING_ROWS
    rings = num_rows * (value_width + num_heads)
    conv = num_ring_rows(delta.conv_taps) * delta.num_channels(num_key_heads, num_heads)
    return (states + rings + conv) * FP32_BYTES + num_rows * num_key_heads * delta.key_dim * BYTES[dtype]


def _counts(spec: ModelSpec, share: Share) -> dict[str, Count]:
    hidden, num_expert_layers = spec.hidden_size, len(spec.expert_layers)
    router_columns = spec.num_experts + (spec.shared_width > 0)
    num_slots = num_expert_layers * 3 * hidden
    return {
        "embedding": Count(spec.vocab_size * hidden),
        "attention": _attention(spec, share),
        "deltanet": _deltanet(spec, share),
        "router": Count(num_expert_layers * router_columns * hidden),
        "experts": Count(num_slots * share.num_experts * spec.expert_width),
        "shared_expert": Count(num_slots * share.num_shared_experts * spec.shared_width),
        "dense": Count(len(spec.dense_layers) * 3 * spec.dense_width * hidden),
        "indexer": _indexer(spec, share),
        "hyper_connections": _hyper(spec),
        "ngram": _ngram(spec),
        "ngram_table": _ngram_table(spec),
        "norms": _norms(spec, share),
        "head": Count(share.vocab_rows * hidden),
    }


def _attention(spec: ModelSpec, share: Share) -> Count:
    num_layers, hidden = len(spec.layers_of(ATTENTION)), spec.hidden_size
    heads_width, kv_width = share.num_heads * spec.head_dim, share.num_kv_heads * spec.head_dim
    projected = heads_width * (2 if spec.query_gate else 1) + 2 * kv_width
    biases = projected + hidden if spec.attention_bias else 0
    return Count(num_layers * hidden * (projected + heads_width), num_layers * biases)


def _deltanet(spec: ModelSpec, share: Share) -> Count:
    delta = spec.deltanet
    if delta is None:
        return Count()
    num_layers, num_heads = len(spec.layers_of(DELTANET)), share.num_value_heads
    value_width = num_heads * delta.value_dim
    channels = delta.num_channels(share.num_key_heads, num_heads)
    linear = channels + value_width + 2 * num_heads + value_width  # q k v, z, b and a, output
    return Count(num_layers * linear * spec.hidden_size, num_layers * (channels * delta.conv_taps + 2 * num_heads))


def _indexer(spec: ModelSpec, share: Share) -> Count:
    if spec.indexer is None or not share.num_heads:
        return Count()
    width = (spec.indexer.num_heads + 1) * spec.indexer.head_dim
    return Count(len(spec.layers_of(ATTENTION)) * width * spec.hidden_size)


def _hyper(spec: ModelSpec) -> Count:
    if spec.hyper is None:
        return Count()
    mixer = 2 * spec.residual_size * spec.hyper.low_rank
    return Count(2 * spec.num_layers * (mixer + spec.residual_size * spec.hyper.num_streams) + mixer)


def _ngram(spec: ModelSpec) -> Count:
    if spec.ngram is None:
        return Count()
    linear = spec.ngram.embed_dim * (spec.residual_size + spec.hidden_size)
    return Count(len(spec.ngram.layers) * linear, len(spec.ngram.layers) * spec.residual_size * spec.ngram.conv_taps)


def _ngram_table(spec: ModelSpec) -> Count:
    if spec.ngram is None:
        return Count()
    num_rows = sum(padded_rows(spec.ngram, index) for index in range(len(spec.ngram.layers)))
    return Count(num_rows * spec.ngram.head_dim)


def _norms(spec: ModelSpec, share: Share) -> Count:
    """Those of heads only where there are any."""
    blocks = 2 * spec.num_layers + 1  # before each block, and before the head
    count = blocks * spec.residual_size
    if share.num_heads:
        index_width = spec.indexer.head_dim if spec.indexer else 0
        count += len(spec.layers_of(ATTENTION)) * 2 * (spec.head_dim + index_width)
    if spec.deltanet is not None and share.num_value_heads:
        count += len(spec.layers_of(DELTANET)) * spec.deltanet.value_dim
    if spec.ngram is not None:
        count += len(spec.ngram.layers) * 3 * spec.residual_size
    return Count(fp32=count)
