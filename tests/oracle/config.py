"""The numbers of a config.json that enter the arithmetic. A block that a model lacks is None."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """layers: those whose first block it is; fused_projections: q, k, v and z lie by key head in one tensor, b and a in
    another."""

    layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    num_taps: int = 4
    output_gate: str = "silu"
    fused_projections: bool = False

    @property
    def ratio(self) -> int:
        return self.num_value_heads // self.num_key_heads


@dataclass(frozen=True, slots=True)
class Indexer:
    num_heads: int
    head_dim: int
    budget: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Hyper:
    num_streams: int
    low_rank: int


@dataclass(frozen=True, slots=True)
class Ngram:
    layers: tuple[int, ...]
    embed_dim: int
    ngram_size: int
    heads_per_ngram: int
    vocab_base: int
    end_id: int
    num_taps: int = 4
    seed: int = 1234


@dataclass(frozen=True, slots=True)
class Config:
    """rotary_dim 0: the whole head. offset_norms: norms store an offset from one. query_gate: queries have gates."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    norm_topk_prob: bool = True
    tie_word_embeddings: bool = False
    mlp_only_layers: tuple[int, ...] = ()
    decoder_sparse_step: int = 1
    rotary_dim: int = 0
    offset_norms: bool = False
    query_gate: bool = False
    shared_expert: bool = False
    deltanet: DeltaNet | None = None
    indexer: Indexer | None = None
    hyper: Hyper | None = None
    ngram: Ngram | None = None

    def is_sparse(self, layer: int) -> bool:
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    @property
    def num_streams(self) -> int:
        return self.hyper.num_streams if self.hyper else 1


def num_head_leaves(num_heads: int) -> int:
    """The largest power of two, at most 8, that divides the number of heads."""
    return next(leaves for leaves in (8, 4, 2, 1) if num_heads % leaves == 0)
