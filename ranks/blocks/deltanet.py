"""Gated DeltaNet: linear attention with a state per value head; a rank computes the heads of its leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ...collectives.exchange import Exchange
from .. import ops
from ..context import RankContext
from ..linear import Linear
from ..memory import BlockMemory, MemorySizes
from ..ops import Stored
from ..rope import inverse_sqrt
from ..rows import StepRows
from ..spec import DELTANET_RING_ROWS, NUM_BORDER_STATES, ROWS_PER_BORDER, DeltaNetSpec, ModelSpec, num_ring_rows
from ..weights import Part, Weights
from .row_split import RowSplitOutput, SplitHeads


class DeltaNetState(BlockMemory):
    """States at the last two borders, and the rows since, by position: going back is going on from an earlier one.

    states FP32 [slots, 2, Hv, Dk, Dv]; keys [slots, 2, Hk, Dk, 64] in the compute dtype; updates FP32
    [slots, 128, Hv, Dv]; decays FP32 [slots, 128, Hv]; conv FP32 [slots, ring rows, channels].
    """

    def __init__(self, sizes: MemorySizes, spec: DeltaNetSpec, num_key_heads: int, num_heads: int) -> None:
        num_slots, channels = sizes.num_slots, spec.num_channels(num_key_heads, num_heads)
        self.states = torch.empty((num_slots, NUM_BORDER_STATES, num_heads, spec.key_dim, spec.value_dim))
        self.keys = Stored.of(sizes.empty(num_slots, NUM_BORDER_STATES, num_key_heads, spec.key_dim, ROWS_PER_BORDER))
        self.updates = torch.empty((num_slots, DELTANET_RING_ROWS, num_heads, spec.value_dim))
        self.decays = torch.empty((num_slots, DELTANET_RING_ROWS, num_heads))
        self.conv = torch.empty((num_slots, num_ring_rows(spec.conv_taps), channels))

    def of_slots(self) -> Sequence[torch.Tensor]:
        return self.states, self.keys.tensor, self.updates, self.decays, self.conv


@dataclass(slots=True)
class DeltaNetHeads:
    """The value heads that one rank owns, the key heads they use, and their state.

    wide: q, k, v, z as one wide linear; narrow: b and a as one narrow linear. conv [taps, channels of q, k and v].
    """

    spec: DeltaNetSpec
    wide: Linear
    narrow: Linear
    conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm_weight: torch.Tensor
    eps: float
    key_index: torch.Tensor
    num_key_heads: int
    scale: float
    state: DeltaNetState = field(init=False)

    @classmethod
    def load(
        cls, weights: Weights, spec: ModelSpec, delta: DeltaNetSpec, heads: range, key_heads: range
    ) -> DeltaNetHeads:
        parts = _HeadRows(delta, heads, key_heads)
        head_rows = (heads.start, heads.stop)
        conv = torch.cat([weights.fp32("conv1d.weight", rows=rows) for rows in parts.of_channels()])
        ratio = delta.heads_per_key_head
        return cls(
            spec=delta,
            wide=Linear.wide(torch.cat(parts.read_wide(weights))),
            narrow=Linear.narrow(torch.cat(parts.read_narrow(weights))),
            conv=conv[:, 0].T.contiguous(),
            a_log=weights.fp32("A_log", rows=head_rows),
            dt_bias=weights.fp32("dt_bias", rows=head_rows),
            norm_weight=weights.fp32("norm.weight"),
            eps=spec.rms_norm_eps,
            key_index=torch.tensor([head // ratio - key_heads.start for head in heads], dtype=torch.int32),
            num_key_heads=len(key_heads),
            scale=inverse_sqrt(delta.key_dim),
        )

    def allocate(self, sizes: MemorySizes) -> list[BlockMemory]:
        self.state = DeltaNetState(sizes, self.spec, self.num_key_heads, len(self.key_index))
        return [self.state]

    def __call__(self, x: torch.Tensor, rows: StepRows) -> torch.Tensor:
        """F32 [M, H] -> F32 [M, heads * Dv]."""
        state, num_heads = self.state, len(self.key_index)
        qkv, z = ops.split_columns(self.wide(x), self.conv.shape[1], num_heads * self.spec.value_dim)
        b, a = ops.split_columns(self.narrow(x), num_heads, num_heads)
        qkv = ops.causal_conv(qkv, self.conv, 1, state.conv, rows)
        out = ops.deltanet(
            qkv, b, a, self.a_log, self.dt_bias, self.key_index, state.states, state.keys, state.updates, state.decays,
            self.scale, rows,
        )  # fmt: skip
        return ops.gated_norm(out, z.view(out.shape), self.norm_weight, self.eps, self.spec.output_gate).flatten(1)


@dataclass(frozen=True, slots=True)
class _HeadRows:
    """Where a rank's heads lie in the published projections, either layout."""

    spec: DeltaNetSpec
    heads: range
    key_heads: range

    def of_channels(self) -> list[Part]:
        """q, k and v among the rows of in_proj_qkv and of conv1d."""
        keys, dim = self.spec.num_key_heads * self.spec.key_dim, self.spec.key_dim
        first, stop = self.key_heads.start * dim, self.key_heads.stop * dim
        values = tuple(2 * keys + row for row in self.of_values())
        return [(first, stop), (keys + first, keys + stop), (values[0], values[1])]

    def of_values(self) -> Part:
        return self.heads.start * self.spec.value_dim, self.heads.stop * self.spec.value_dim

    def read_wide(self, weights: Weights) -> list[torch.Tensor]:
        """The rows of q, k, v and z."""
        if not self.spec.fused_projections:
            qkv = [weights.linear("in_proj_qkv.weight", rows=rows) for rows in self.of_channels()]
            return [*qkv, weights.linear("in_proj_z.weight", rows=self.of_values())]
        ratio = self.spec.heads_per_key_head
        sizes = [self.spec.key_dim, self.spec.key_dim, ratio * self.spec.value_dim, ratio * self.spec.value_dim]
        q, k, v, z = self._read_by_key_head(weights, "in_proj_qkvz.weight", sizes)
        return [q, k, self._own(v, self.spec.value_dim), self._own(z, self.spec.value_dim)]

    def read_narrow(self, weights: Weights) -> list[torch.Tensor]:
        """The rows of b and a."""
        if not self.spec.fused_projections:
            rows = (self.heads.start, self.heads.stop)
            return [weights.linear(f"in_proj_{name}.weight", rows=rows) for name in ("b", "a")]
        ratio = self.spec.heads_per_key_head
        b, a = self._read_by_key_head(weights, "in_proj_ba.weight", [ratio, ratio])
        return [self._own(b, 1), self._own(a, 1)]

    def _read_by_key_head(self, weights: Weights, name: str, sizes: list[int]) -> list[torch.Tensor]:
        """Rows stored key head by key head, each with parts of these sizes: part by part, of this rank's key heads."""
        rows_per_head = sum(sizes)
        rows = (self.key_heads.start * rows_per_head, self.key_heads.stop * rows_per_head)
        by_head = weights.linear(name, rows=rows).view(len(self.key_heads), rows_per_head, -1)
        return [part.flatten(0, 1) for part in torch.split(by_head, sizes, dim=1)]

    def _own(self, rows: torch.Tensor, dim: int) -> torch.Tensor:
        """Of the value heads of this rank's key heads, those that it owns: a key head's may lie on two ranks."""
        first = self.heads.start - self.key_heads.start * self.spec.heads_per_key_head
        return rows[first * dim : (first + len(self.heads)) * dim]


def load_deltanet(
    weights: Weights, spec: ModelSpec, delta: DeltaNetSpec, exchange: Exchange, context: RankContext
) -> SplitHeads:
    heads = delta.value_heads(context.rank, context.num_ranks)
    key_heads = delta.key_heads(context.rank, context.num_ranks)
    columns = (heads.start * delta.value_dim, heads.stop * delta.value_dim)
    return SplitHeads(
        own=DeltaNetHeads.load(weights, spec, delta, heads, key_heads) if heads else None,
        output=RowSplitOutput.load(weights.under("out_proj."), columns, exchange, has_bias=False),
    )
