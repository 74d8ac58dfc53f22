"""The indexer of sparse attention: which keys each row sees, the same on every rank that has heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .. import ops
from ..linear import Linear
from ..memory import BlockMemory, MemorySizes
from ..ops import Stored
from ..rope import inverse_sqrt
from ..rows import StepRows
from ..spec import IndexerSpec, ModelSpec, num_ring_rows
from ..weights import Weights
from .norm import RMSNorm
from .rotary import Rotary


class IndexPages(BlockMemory):
    """Pooled keys of complete blocks, in the compute dtype, and the last raw keys of every slot.

    keys [num_pages, D, blocks_per_page]: block j of a slot lies in its page j // blocks_per_page. Raw keys
    FP32 [num_slots, ring rows, D], by position.
    """

    def __init__(self, sizes: MemorySizes, indexer: IndexerSpec) -> None:
        # A block's page is one that the slot has by then, whatever the page size.
        blocks_per_page = -(-sizes.page_size // indexer.block_size)
        self.keys = Stored.of(sizes.empty(sizes.num_pages, indexer.head_dim, blocks_per_page))
        self.ring = torch.empty((sizes.num_slots, num_ring_rows(indexer.block_size), indexer.head_dim))

    def paged(self) -> Sequence[torch.Tensor]:
        return (self.keys.tensor,)

    def of_slots(self) -> Sequence[torch.Tensor]:
        return (self.ring,)


@dataclass(slots=True)
class Indexer:
    """projection: index queries of all heads, then the one raw key, as a narrow linear."""

    projection: Linear
    query_norm: RMSNorm
    key_norm: RMSNorm
    rotary: Rotary
    spec: IndexerSpec
    scale: float
    pages: IndexPages = field(init=False)

    @classmethod
    def load(cls, weights: Weights, spec: ModelSpec, indexer: IndexerSpec, rotary: Rotary) -> Indexer:
        return cls(
            projection=Linear.narrow(weights.linear("index_qk_proj.weight")),
            query_norm=RMSNorm.load(weights, "q_layernorm", spec),
            key_norm=RMSNorm.load(weights, "k_layernorm", spec),
            rotary=rotary,
            spec=indexer,
            scale=inverse_sqrt(indexer.head_dim),
        )

    def allocate(self, sizes: MemorySizes) -> BlockMemory:
        self.pages = IndexPages(sizes, self.spec)
        return self.pages

    def __call__(self, x: torch.Tensor, rows: StepRows) -> ops.Selection | None:
        """F32 [M, H] -> the keys that each row sees; None where all rows see all of theirs."""
        num_heads, head_dim = self.spec.num_heads, self.spec.head_dim
        queries, raw = ops.split_columns(self.projection(x), num_heads * head_dim, head_dim)
        ops.store_index_keys(
            raw, self.pages.ring, self.key_norm.weight, self.key_norm.eps, self.key_norm.is_offset,
            self.rotary.frequencies, self.rotary.attention_factor, self.spec.block_size, self.pages.keys, rows,
        )  # fmt: skip
        if int(rows.positions.max()) < self.spec.budget:
            return None
        queries = self.rotary(self.query_norm(queries.view(-1, num_heads, head_dim)), rows.positions)
        return ops.select_keys(queries, self.pages.keys, self.spec.block_size, self.spec.budget, self.scale, rows)
