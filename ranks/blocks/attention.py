"""Grouped-query attention with normed, rotated queries and keys; a rank computes the heads of its leaves."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...collectives.exchange import Exchange
from .. import ops
from ..linear import Linear, RowSplitLinear
from ..rope import attention_factor, attention_scale, frequencies
from ..rows import RowPlaces, StepRows
from ..sizes import layer_name
from ..spec import ModelSpec
from ..weights import Part, WeightReader
from .norm import RMSNorm


@dataclass(frozen=True, slots=True)
class Rotary:
    """frequencies FP32 [D / 2]; shared by all layers."""

    frequencies: torch.Tensor
    attention_factor: float

    @classmethod
    def of(cls, spec: ModelSpec) -> Rotary:
        # Every value is an FP32 number already: the conversion from double is exact.
        exact = torch.tensor(frequencies(spec.rope, spec.head_dim), dtype=torch.float32)
        return cls(exact, attention_factor(spec.rope))

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return ops.rotary(x, positions, self.frequencies, self.attention_factor)


@dataclass(frozen=True, slots=True)
class OwnHeads:
    """The projections of the heads one rank owns.

    kv_index I32 [heads]: the place of a head's KV head among those in this rank's pages.
    """

    query: Linear
    key: Linear
    value: Linear
    query_norm: RMSNorm
    key_norm: RMSNorm
    output: RowSplitLinear
    kv_index: torch.Tensor
    head_dim: int

    @classmethod
    def load(cls, reader: WeightReader, spec: ModelSpec, layer: int, rank: int, num_ranks: int) -> OwnHeads:
        heads, kv_heads = spec.heads(rank, num_ranks), spec.kv_heads(rank, num_ranks)
        head_columns = (heads.start * spec.head_dim, heads.stop * spec.head_dim)
        kv_rows = (kv_heads[0] * spec.head_dim, (kv_heads[-1] + 1) * spec.head_dim)
        output = reader.linear(layer_name(layer, "self_attn.o_proj.weight"), columns=head_columns)
        return cls(
            query=_projection(reader, spec, layer, "q_proj", head_columns),
            key=_projection(reader, spec, layer, "k_proj", kv_rows),
            value=_projection(reader, spec, layer, "v_proj", kv_rows),
            query_norm=RMSNorm.load(reader, layer_name(layer, "self_attn.q_norm.weight"), spec.rms_norm_eps),
            key_norm=RMSNorm.load(reader, layer_name(layer, "self_attn.k_norm.weight"), spec.rms_norm_eps),
            output=RowSplitLinear.of(output, len(spec.attention_leaves(rank, num_ranks))),
            kv_index=torch.tensor([kv_heads.index(spec.kv_head_of(head)) for head in heads], dtype=torch.int32),
            head_dim=spec.head_dim,
        )

    def split(self, projected: torch.Tensor) -> torch.Tensor:
        """[M, heads * D] -> [M, heads, D]."""
        return projected.view(projected.shape[0], -1, self.head_dim)


def _projection(reader: WeightReader, spec: ModelSpec, layer: int, name: str, rows: Part) -> Linear:
    prefix = layer_name(layer, f"self_attn.{name}.")
    bias = reader.fp32(f"{prefix}bias", rows=rows) if spec.attention_bias else None
    return Linear.wide(reader.linear(f"{prefix}weight", rows=rows), bias)


@dataclass(frozen=True, slots=True)
class Attention:
    """`own` is None on a rank without heads; such a rank only takes part in the exchange."""

    own: OwnHeads | None
    own_leaves: range
    num_leaves: int
    output_bias: torch.Tensor | None
    rotary: Rotary
    scale: float
    exchange: Exchange

    @classmethod
    def load(
        cls,
        reader: WeightReader,
        spec: ModelSpec,
        layer: int,
        rotary: Rotary,
        exchange: Exchange,
        rank: int,
        num_ranks: int,
    ) -> Attention:
        own_leaves = spec.attention_leaves(rank, num_ranks)
        bias_name = layer_name(layer, "self_attn.o_proj.bias")
        return cls(
            own=OwnHeads.load(reader, spec, layer, rank, num_ranks) if own_leaves else None,
            own_leaves=own_leaves,
            num_leaves=spec.num_attention_leaves,
            output_bias=reader.fp32(bias_name) if spec.attention_bias else None,
            rotary=rotary,
            scale=attention_scale(spec.head_dim),
            exchange=exchange,
        )

    def __call__(
        self, x: torch.Tensor, rows: StepRows, places: RowPlaces, key_pages: torch.Tensor, value_pages: torch.Tensor
    ) -> torch.Tensor:
        """F32 [M, H] -> F32 [M, H], equal on every rank; the rows' keys and values are stored on the way."""
        slot_rows = torch.empty((x.shape[0], self.num_leaves, x.shape[1]))
        if self.own is not None:
            heads = self._heads(self.own, x, rows, places, key_pages, value_pages)
            slot_rows[:, self.own_leaves.start : self.own_leaves.stop] = self.own.output.leaves(heads)
        slot_ids = torch.arange(self.num_leaves, dtype=torch.int32).repeat(x.shape[0], 1)
        summed = self.exchange.sum(slot_rows, slot_ids)
        return summed if self.output_bias is None else summed + self.output_bias

    def _heads(
        self,
        own: OwnHeads,
        x: torch.Tensor,
        rows: StepRows,
        places: RowPlaces,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
    ) -> torch.Tensor:
        """The attended values of this rank's heads, F32 [M, heads * D]."""
        queries = self.rotary(own.query_norm(own.split(own.query(x))), rows.positions)
        keys = self.rotary(own.key_norm(own.split(own.key(x))), rows.positions)
        values = own.split(own.value(x))
        # All rows of the step are stored before any is attended: a prompt's rows see each other.
        ops.store_kv(keys, values, key_pages, value_pages, places.pages, places.offsets)
        attended = ops.attention(
            queries, key_pages, value_pages, rows.page_table, rows.slots, places.num_keys, own.kv_index, self.scale
        )
        return attended.flatten(1)
