"""A decoder: embedding, layers, final norm, head. What its layers are, and how they meet the residual, families say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ...collectives.exchange import Exchange
from ..blocks.attention import load_attention
from ..blocks.deltanet import load_deltanet
from ..blocks.dense import DenseMLP
from ..blocks.embedding import Embedding
from ..blocks.experts import Experts
from ..blocks.head import Head
from ..blocks.rotary import Rotary
from ..blocks.row_split import SplitHeads
from ..context import RankContext
from ..memory import BlockMemory, MemorySizes, ModelMemory
from ..rows import StepRows
from ..sizes import HEAD, embedding_name
from ..spec import ATTENTION, DELTANET, ModelSpec
from ..weights import WeightReader, Weights
from .causal import Residual, ResidualWatch


class Layer(Protocol):
    def allocate(self, sizes: MemorySizes) -> list[BlockMemory]: ...

    def __call__(self, residual: torch.Tensor, rows: StepRows, /) -> torch.Tensor:
        """F32 [M, R] -> F32 [M, R]."""


FinalNorm = Callable[[torch.Tensor], torch.Tensor]
"""F32 [D, R] -> F32 [D, H]: what stands between the residual and the head."""


class Parts:
    """The blocks of one rank's share, as a family asks for them, layer by layer."""

    def __init__(self, spec: ModelSpec, reader: WeightReader, context: RankContext) -> None:
        self.spec = spec
        self.weights = reader.under(spec.tensor_prefix)
        self.context = context
        self.rotary = Rotary.of(spec)
        self.experts = context.expert_exchange(spec.num_experts, spec.top_k, has_shared=spec.shared_width > 0)
        has_attention, has_deltanet = (kind in spec.layer_kinds for kind in (ATTENTION, DELTANET))
        self.attention = context.head_exchange(spec.num_attention_leaves) if has_attention else None
        self.deltanet = context.head_exchange(spec.deltanet.num_leaves) if has_deltanet and spec.deltanet else None

    def layer_weights(self, layer: int) -> Weights:
        return self.weights.under(f"layers.{layer}.")

    def token_mixer(self, layer: int) -> SplitHeads:
        """The layer's first block, the one in which rows of a request meet."""
        weights, spec = self.layer_weights(layer), self.spec
        if spec.layer_kinds[layer] == DELTANET:
            assert spec.deltanet is not None
            assert self.deltanet is not None
            return load_deltanet(weights.under("linear_attn."), spec, spec.deltanet, self.deltanet, self.context)
        assert self.attention is not None
        return load_attention(weights.under("self_attn."), spec, self.rotary, self.attention, self.context)

    def mlp(self, layer: int) -> DenseMLP | Experts:
        weights = self.layer_weights(layer).under("mlp.")
        return (
            DenseMLP.load(weights)
            if layer in self.spec.dense_layers
            else Experts.load(weights, self.spec, self.experts)
        )

    def exchanges(self) -> dict[str, Exchange]:
        """By the name of what is summed."""
        named = {"experts": self.experts, "attention": self.attention, "deltanet": self.deltanet}
        return {name: exchange for name, exchange in named.items() if exchange is not None}


@dataclass(frozen=True, slots=True)
class Family:
    """How a family wires its blocks."""

    load_layer: Callable[[Parts, int], Layer]
    load_final_norm: Callable[[Parts], FinalNorm]


class Decoder:
    """One rank's share; see CausalModel."""

    def __init__(self, family: Family, spec: ModelSpec, reader: WeightReader, context: RankContext) -> None:
        parts = Parts(spec, reader, context)
        self.spec = spec
        self.layer_digests = context.layer_digests
        self.vocab_ranges = tuple(spec.vocab_range(rank, context.num_ranks) for rank in range(context.num_ranks))
        self.exchanges = parts.exchanges()
        self.embedding = Embedding.load(reader, embedding_name(spec))
        self.layers = [family.load_layer(parts, layer) for layer in range(spec.num_layers)]
        self.final_norm = family.load_final_norm(parts)
        # A stored head counts also where the config ties it to the embedding.
        head_name = HEAD if HEAD in reader.checkpoint.entries else embedding_name(spec)
        self.head = Head.load(reader, head_name, self.vocab_ranges[context.rank])

    @property
    def num_exchanges(self) -> int:
        return sum(exchange.num_exchanges for exchange in self.exchanges.values())

    @property
    def exchange_mode(self) -> str:
        modes = {name: exchange.mode for name, exchange in self.exchanges.items()}
        if len(set(modes.values())) == 1:
            return modes["experts"]
        return ", ".join(f"{name} {mode}" for name, mode in modes.items())

    def allocate(self, sizes: MemorySizes) -> ModelMemory:
        return ModelMemory([memory for layer in self.layers for memory in layer.allocate(sizes)])

    def forward(self, rows: StepRows) -> Residual:
        residual = self.embedding(rows.token_ids)
        if self.spec.num_streams > 1:
            residual = residual.repeat(1, self.spec.num_streams)
        watch = ResidualWatch(rows.positions, self.layer_digests)
        for layer in self.layers:
            residual = layer(residual, rows)
            watch.after_layer(residual)
        return watch.final(residual)

    def logits(self, residual_rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.final_norm(residual_rows))
