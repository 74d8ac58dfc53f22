"""A block whose heads ranks share: each computes the leaves of its heads, the exchange adds them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import torch

from ...collectives.exchange import Exchange
from ..linear import RowSplitLinear
from ..memory import BlockMemory, MemorySizes
from ..rows import StepRows
from ..weights import Part, Weights


class OwnHeads(Protocol):
    """What comes before the output projection, for the heads of one rank."""

    def allocate(self, sizes: MemorySizes) -> list[BlockMemory]: ...

    def __call__(self, x: torch.Tensor, rows: StepRows, /) -> torch.Tensor:
        """F32 [M, H] -> F32 [M, own heads * D]."""


@dataclass(frozen=True, slots=True)
class SplitHeads:
    """`own` is None on a rank without heads; such a rank only takes part in the exchange."""

    own: OwnHeads | None
    output: RowSplitOutput

    def allocate(self, sizes: MemorySizes) -> list[BlockMemory]:
        return self.own.allocate(sizes) if self.own is not None else []

    def __call__(self, x: torch.Tensor, rows: StepRows) -> torch.Tensor:
        """F32 [M, H] -> F32 [M, H], equal on every rank."""
        heads = None if self.own is None else self.own(x, rows)
        return self.output(heads, *x.shape)


@dataclass(frozen=True, slots=True)
class RowSplitOutput:
    """The output projection. `own`: this rank's leaves of it, None where it has none. bias FP32 [H]."""

    own: RowSplitLinear | None
    own_leaves: range
    num_leaves: int
    bias: torch.Tensor | None
    exchange: Exchange

    @classmethod
    def load(cls, weights: Weights, columns: Part, exchange: Exchange, *, has_bias: bool) -> RowSplitOutput:
        """`columns`: those of the rank's heads; its leaves are the ids that it owns in the exchange."""
        ids = exchange.placement.ids_of(exchange.rank)
        own = RowSplitLinear.of(weights.linear("weight", columns=columns), len(ids)) if ids else None
        return cls(
            own=own,
            own_leaves=range(ids[0], ids[-1] + 1) if ids else range(0),
            num_leaves=exchange.placement.tree.num_ids,
            bias=weights.fp32("bias") if has_bias else None,
            exchange=exchange,
        )

    def __call__(self, heads: torch.Tensor | None, num_rows: int, hidden_size: int) -> torch.Tensor:
        """heads F32 [M, own heads * D], None on a rank that has none -> F32 [M, H], equal on every rank."""
        leaves = None if self.own is None or heads is None else self.own.leaves(heads)
        if leaves is not None and len(self.own_leaves) == self.num_leaves:
            slot_rows = leaves
        else:
            slot_rows = torch.empty((num_rows, self.num_leaves, hidden_size))
            if leaves is not None:
                slot_rows[:, self.own_leaves.start : self.own_leaves.stop] = leaves
        summed = self.exchange.sum(slot_rows, _every_leaf(num_rows, self.num_leaves))
        return summed if self.bias is None else summed + self.bias


@functools.lru_cache(maxsize=4)  # a batch has one size in all its layers
def _every_leaf(num_rows: int, num_leaves: int) -> torch.Tensor:
    """Slot ids I32 [num_rows, num_leaves]: every row has every leaf, in every layer and most steps alike."""
    return torch.arange(num_leaves, dtype=torch.int32).repeat(num_rows, 1)
