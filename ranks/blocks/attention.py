"""Grouped-query attention with normed, rotated queries and keys; a rank computes the heads of its leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ...collectives.exchange import Exchange
from .. import ops
from ..context import RankContext
from ..linear import Linear
from ..memory import BlockMemory, KVPages, MemorySizes
from ..rope import inverse_sqrt
from ..rows import StepRows
from ..spec import ModelSpec
from ..weights import Part, Weights
from .indexer import Indexer
from .norm import RMSNorm
from .rotary import Rotary
from .row_split import RowSplitOutput, SplitHeads


@dataclass(slots=True)
class AttentionHeads:
    """The heads that one rank owns, and their keys and values.

    projection: queries, their gates where the family has them, keys and values as one wide linear of [heads * D |
    heads * D | KV heads * D | KV heads * D] columns; a column's bits do not depend on the others. kv_index I32 [heads]:
    the place of a head's KV head among those in this rank's pages.
    """

    projection: Linear
    query_norm: RMSNorm
    key_norm: RMSNorm
    rotary: Rotary
    kv_index: torch.Tensor
    num_kv_heads: int
    head_dim: int
    has_gate: bool
    scale: float
    indexer: Indexer | None
    pages: KVPages = field(init=False)

    @classmethod
    def load(cls, weights: Weights, spec: ModelSpec, rotary: Rotary, context: RankContext) -> AttentionHeads:
        heads = spec.heads(context.rank, context.num_ranks)
        kv_heads = spec.kv_heads(context.rank, context.num_ranks)
        return cls(
            projection=_projection(weights, spec, heads, kv_heads),
            query_norm=RMSNorm.load(weights, "q_norm", spec),
            key_norm=RMSNorm.load(weights, "k_norm", spec),
            rotary=rotary,
            kv_index=torch.tensor([kv_heads.index(spec.kv_head_of(head)) for head in heads], dtype=torch.int32),
            num_kv_heads=len(kv_heads),
            head_dim=spec.head_dim,
            has_gate=spec.query_gate,
            scale=inverse_sqrt(spec.head_dim),
            indexer=Indexer.load(weights.under("indexer."), spec, spec.indexer, rotary) if spec.indexer else None,
        )

    def allocate(self, sizes: MemorySizes) -> list[BlockMemory]:
        self.pages = KVPages(sizes, self.num_kv_heads, self.head_dim)
        return [self.pages, self.indexer.allocate(sizes)] if self.indexer else [self.pages]

    def __call__(self, x: torch.Tensor, rows: StepRows) -> torch.Tensor:
        """F32 [M, H] -> the attended values of these heads, F32 [M, heads * D]."""
        queries, gates, keys, values = self._project(x)
        queries = self.rotary(self.query_norm(queries), rows.positions)
        keys = self.rotary(self.key_norm(keys), rows.positions)
        pages, places = self.pages, rows.places
        # All rows of the step are stored before any is attended: a prompt's rows see each other.
        ops.store_kv(keys, values, pages.keys, pages.values, places.pages, places.offsets)
        selection = self.indexer(x, rows) if self.indexer else None
        attended = ops.attention(
            queries, pages.keys, pages.values, rows.page_table, rows.slots, places.num_keys, self.kv_index, self.scale,
            selection,
        )  # fmt: skip
        if gates is not None:
            attended = ops.sigmoid_times(attended, gates)
        return attended.flatten(1)

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """F32 [M, H] -> queries and gates [M, heads, D], keys and values [M, KV heads, D]."""
        query_width, kv_width = len(self.kv_index) * self.head_dim, self.num_kv_heads * self.head_dim
        widths = (query_width, query_width * self.has_gate, kv_width, kv_width)
        parts = ops.split_columns(self.projection(x), *widths)
        queries, gates, keys, values = (part.view(x.shape[0], -1, self.head_dim) for part in parts)
        return queries, gates if self.has_gate else None, keys, values


def _projection(weights: Weights, spec: ModelSpec, heads: range, kv_heads: Sequence[int]) -> Linear:
    dim, query_dim = spec.head_dim, spec.head_dim * (2 if spec.query_gate else 1)
    query_rows: Part = (heads.start * query_dim, heads.stop * query_dim)
    kv_rows: Part = (kv_heads[0] * dim, (kv_heads[-1] + 1) * dim)
    parts = (("q_proj.", query_rows), ("k_proj.", kv_rows), ("v_proj.", kv_rows))

    def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
        if spec.query_gate:  # stored head by head, query before gate
            by_head = tensors[0].view(len(heads), 2, dim, *tensors[0].shape[1:])
            tensors[:1] = [by_head[:, 0].flatten(0, 1), by_head[:, 1].flatten(0, 1)]
        return torch.cat(tensors)

    weight = joined([weights.linear(f"{name}weight", rows=rows) for name, rows in parts])
    if not spec.attention_bias:
        return Linear.wide(weight)
    return Linear.wide(weight, joined([weights.fp32(f"{name}bias", rows=rows) for name, rows in parts]))


def load_attention(
    weights: Weights, spec: ModelSpec, rotary: Rotary, exchange: Exchange, context: RankContext
) -> SplitHeads:
    """The rows' keys and values are stored on the way."""
    heads = spec.heads(context.rank, context.num_ranks)
    columns = (heads.start * spec.head_dim, heads.stop * spec.head_dim)
    return SplitHeads(
        own=AttentionHeads.load(weights, spec, rotary, context) if heads else None,
        output=RowSplitOutput.load(weights.under("o_proj."), columns, exchange, has_bias=spec.attention_bias),
    )
