"""The family qwen3_moe: attention and experts (or a dense MLP) around an FP32 residual."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import ops
from ..blocks.attention import Attention, Rotary
from ..blocks.dense import DenseMLP
from ..blocks.embedding import Embedding
from ..blocks.experts import Experts
from ..blocks.head import Head
from ..blocks.norm import RMSNorm
from ..context import RankContext
from ..kv import KVPages
from ..rows import StepRows
from ..sizes import EMBEDDING, FINAL_NORM, HEAD, layer_name
from ..spec import ModelSpec
from ..weights import WeightReader
from .causal import Residual, ResidualWatch


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: DenseMLP | Experts


class Qwen3Moe:
    """One rank's share; see CausalModel."""

    def __init__(self, spec: ModelSpec, reader: WeightReader, context: RankContext) -> None:
        rank, num_ranks = context.rank, context.num_ranks
        self.spec = spec
        self.layer_digests = context.layer_digests
        self.kv_heads = spec.kv_heads(rank, num_ranks)
        self.vocab_ranges = tuple(spec.vocab_range(each, num_ranks) for each in range(num_ranks))
        self.expert_exchange = context.expert_exchange(spec.num_experts, spec.top_k)
        self.attention_exchange = context.attention_exchange(spec.num_attention_leaves)
        self.embedding = Embedding.load(reader, EMBEDDING)
        rotary = Rotary.of(spec)
        self.layers = [self._load_layer(reader, layer, rotary, context) for layer in range(spec.num_layers)]
        final_norm = RMSNorm.load(reader, FINAL_NORM, spec.rms_norm_eps)
        self.head = Head.load(reader, final_norm, EMBEDDING if spec.tied_embeddings else HEAD, self.vocab_ranges[rank])

    def _load_layer(self, reader: WeightReader, layer: int, rotary: Rotary, context: RankContext) -> Layer:
        spec, exchange = self.spec, self.attention_exchange
        return Layer(
            attention_norm=RMSNorm.load(reader, layer_name(layer, "input_layernorm.weight"), spec.rms_norm_eps),
            attention=Attention.load(reader, spec, layer, rotary, exchange, context.rank, context.num_ranks),
            mlp_norm=RMSNorm.load(reader, layer_name(layer, "post_attention_layernorm.weight"), spec.rms_norm_eps),
            mlp=self._load_mlp(reader, layer, context),
        )

    def _load_mlp(self, reader: WeightReader, layer: int, context: RankContext) -> DenseMLP | Experts:
        if layer in self.spec.dense_layers:
            return DenseMLP.load(reader, layer_name(layer, "mlp."))
        owned_ids = tuple(self.expert_exchange.placement.ids_of(context.rank))
        return Experts.load(reader, self.spec, layer, owned_ids, self.expert_exchange)

    @property
    def num_exchanges(self) -> int:
        return self.expert_exchange.num_exchanges + self.attention_exchange.num_exchanges

    @property
    def exchange_mode(self) -> str:
        modes = (self.expert_exchange.mode, self.attention_exchange.mode)
        return modes[0] if modes[0] == modes[1] else f"experts {modes[0]}, attention {modes[1]}"

    def forward(self, rows: StepRows, kv: KVPages) -> Residual:
        residual = self.embedding(rows.token_ids)
        places = rows.places(kv.page_size)
        watch = ResidualWatch(rows.positions, self.layer_digests)
        for index, layer in enumerate(self.layers):
            normed = layer.attention_norm(residual)
            residual = ops.add(residual, layer.attention(normed, rows, places, kv.keys[index], kv.values[index]))
            residual = ops.add(residual, layer.mlp(layer.mlp_norm(residual)))
            watch.after_layer(residual)
        return watch.final(residual)

    def logits(self, residual_rows: torch.Tensor) -> torch.Tensor:
        return self.head(residual_rows)
