"""Grouped-query attention with normed, rotated queries and keys; a rank computes the heads of its leaves."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from ...collectives.exchange import Exchange
from .. import ops
from ..linear import Linear, RowSplitLinear
from ..ops import Stored
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

    projection: queries, keys and values as one wide linear of [heads * D | KV heads * D | KV heads * D] columns; a
    column's bits do not depend on the others. kv_index I32 [heads]: the place of a head's KV head among those in this
    rank's pages.
    """

    projection: Linear
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
            projection=_projection(reader, spec, layer, head_columns, kv_rows),
            query_norm=RMSNorm.load(reader, layer_name(layer, "self_attn.q_norm.weight"), spec.rms_norm_eps),
            key_norm=RMSNorm.load(reader, layer_name(layer, "self_attn.k_norm.weight"), spec.rms_norm_eps),
            output=RowSplitLinear.of(output, len(spec.attention_leaves(rank, num_ranks))),
            kv_index=torch.tensor([kv_heads.index(spec.kv_head_of(head)) for head in heads], dtype=torch.int32),
            head_dim=spec.head_dim,
        )

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """F32 [M, H] -> queries [M, heads, D], keys and values [M, KV heads, D]."""
        num_heads = len(self.kv_index)
        heads = self.projection(x).numpy().reshape(len(x), -1, self.head_dim)
        first_value = (heads.shape[1] + num_heads) // 2
        parts = (heads[:, :num_heads], heads[:, num_heads:first_value], heads[:, first_value:])
        queries, keys, values = (torch.from_numpy(np.ascontiguousarray(part)) for part in parts)
        return queries, keys, values


def _projection(reader: WeightReader, spec: ModelSpec, layer: int, query_rows: Part, kv_rows: Part) -> Linear:
    parts = (("q_proj", query_rows), ("k_proj", kv_rows), ("v_proj", kv_rows))
    names = [(layer_name(layer, f"self_attn.{name}."), rows) for name, rows in parts]
    weight = torch.cat([reader.linear(f"{prefix}weight", rows=rows) for prefix, rows in names])
    if not spec.attention_bias:
        return Linear.wide(weight)
    return Linear.wide(weight, torch.cat([reader.fp32(f"{prefix}bias", rows=rows) for prefix, rows in names]))


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
        self, x: torch.Tensor, rows: StepRows, places: RowPlaces, key_pages: Stored, value_pages: Stored
    ) -> torch.Tensor:
        """F32 [M, H] -> F32 [M, H], equal on every rank; the rows' keys and values are stored on the way."""
        leaves = None
        if self.own is not None:
            leaves = self.own.output.leaves(self._heads(self.own, x, rows, places, key_pages, value_pages))
        if leaves is not None and len(self.own_leaves) == self.num_leaves:
            slot_rows = leaves
        else:
            slot_rows = torch.empty((x.shape[0], self.num_leaves, x.shape[1]))
            if leaves is not None:
                slot_rows[:, self.own_leaves.start : self.own_leaves.stop] = leaves
        summed = self.exchange.sum(slot_rows, _every_leaf(x.shape[0], self.num_leaves))
        return summed if self.output_bias is None else summed + self.output_bias

    def _heads(
        self,
        own: OwnHeads,
        x: torch.Tensor,
        rows: StepRows,
        places: RowPlaces,
        key_pages: Stored,
        value_pages: Stored,
    ) -> torch.Tensor:
        """The attended values of this rank's heads, F32 [M, heads * D]."""
        queries, keys, values = own.project(x)
        queries = self.rotary(own.query_norm(queries), rows.positions)
        keys = self.rotary(own.key_norm(keys), rows.positions)
        # All rows of the step are stored before any is attended: a prompt's rows see each other.
        ops.store_kv(keys, values, key_pages, value_pages, places.pages, places.offsets)
        attended = ops.attention(
            queries, key_pages, value_pages, rows.page_table, rows.slots, places.num_keys, own.kv_index, self.scale
        )
        return attended.flatten(1)


@functools.lru_cache(maxsize=4)  # a batch has one size in all its layers
def _every_leaf(num_rows: int, num_leaves: int) -> torch.Tensor:
    """Slot ids I32 [num_rows, num_leaves]: every row has every leaf, in every layer and most steps alike."""
    return torch.arange(num_leaves, dtype=torch.int32).repeat(num_rows, 1)
