"""The n-gram embedding: rows of a large table, chosen by hashes of the last tokens, added to every stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from .. import ops
from ..linear import Linear
from ..mapped_table import MappedTable
from ..memory import BlockMemory, MemorySizes
from ..ngram_tables import multipliers, table_sizes
from ..rope import inverse_sqrt
from ..rows import StepRows
from ..spec import HyperSpec, ModelSpec, NgramSpec, num_ring_rows
from ..weights import Weights
from .norm import RMSNorm

I64 = NDArray[np.int64]

NORMS = ("norm_key", "norm_query", "norm_conv")


class NgramState(BlockMemory):
    """The last tokens and the last inputs of the convolution of every slot, by position.

    tokens I64 [slots, ring rows]; conv FP32 [slots, ring rows, S * H].
    """

    def __init__(self, sizes: MemorySizes, ngram: NgramSpec, residual_size: int) -> None:
        self.tokens = torch.empty((sizes.num_slots, num_ring_rows(ngram.ngram_size)), dtype=torch.int64)
        self.conv = torch.empty((sizes.num_slots, num_ring_rows(ngram.conv_reach), residual_size))

    def of_slots(self) -> Sequence[torch.Tensor]:
        return self.tokens, self.conv


@dataclass(frozen=True, slots=True)
class NgramHashes:
    """Which rows of a layer's tables a token and those before it choose; the layer is the `index`-th with such tables.

    multipliers I64 [n]; sizes, offsets I64 [heads]: rows of each head's table, and where it begins.
    """

    spec: NgramSpec
    multipliers: I64
    sizes: I64
    offsets: I64

    @classmethod
    def of(cls, ngram: NgramSpec, vocab_size: int, index: int) -> NgramHashes:
        sizes = np.array(table_sizes(ngram, index), dtype=np.int64)
        factors = np.array(multipliers(ngram, vocab_size, index), dtype=np.int64)
        return cls(ngram, factors, sizes, np.cumsum(sizes) - sizes)

    def check_stored(self, weights: Weights) -> None:
        """Some files hold what these are made of; ModelError where that is something else."""
        weights.check_integers("layer_multipliers", self.multipliers.tolist())
        weights.check_integers("ngram_heads_vocab_sizes", self.sizes.tolist())
        weights.check_integers("ngram_heads_offsets", self.offsets.tolist())

    def row_ids(self, history: I64) -> I64:
        """history I64 [M, n]: a row's token, the one before it, …; the end id where there is none -> [M, heads]."""
        is_cut = np.logical_or.accumulate(history[:, 1:] == self.spec.end_id, axis=1)
        tokens = np.concatenate([history[:, :1], np.where(is_cut, self.spec.end_id, history[:, 1:])], axis=1)
        mixed = np.bitwise_xor.accumulate(tokens * self.multipliers, axis=1)[:, 1:]
        by_head = np.repeat(mixed, self.spec.heads_per_ngram, axis=1)
        ids: I64 = by_head % self.sizes + self.offsets
        return ids


@dataclass(slots=True)
class NgramEmbedding:
    """projection: a key for each stream, then the value, as one wide linear. conv [taps, S * H]."""

    spec: NgramSpec
    hashes: NgramHashes
    table: MappedTable
    projection: Linear
    key_norm: RMSNorm
    query_norm: RMSNorm
    conv_norm: RMSNorm
    conv: torch.Tensor
    scale: float
    residual_size: int
    num_streams: int
    state: NgramState = field(init=False)

    @classmethod
    def load(cls, weights: Weights, spec: ModelSpec, ngram: NgramSpec, hyper: HyperSpec, index: int) -> NgramEmbedding:
        """`index` counts the layers that have an n-gram embedding."""
        key, value = (weights.linear(f"{name}_proj.weight") for name in ("key", "value"))
        norms = [RMSNorm.load_grouped(weights, name, spec, hyper.num_streams) for name in NORMS]
        hashes = NgramHashes.of(ngram, spec.vocab_size, index)
        hashes.check_stored(weights.under("ple_embedding."))
        return cls(
            spec=ngram,
            hashes=hashes,
            table=MappedTable(weights.table("ple_embedding.ngram_embedding")),
            projection=Linear.wide(torch.cat([key, value])),
            key_norm=norms[0],
            query_norm=norms[1],
            conv_norm=norms[2],
            conv=weights.fp32("conv1d.weight")[:, 0].T.contiguous(),
            scale=inverse_sqrt(spec.hidden_size),
            residual_size=spec.residual_size,
            num_streams=hyper.num_streams,
        )

    def allocate(self, sizes: MemorySizes) -> BlockMemory:
        self.state = NgramState(sizes, self.spec, self.residual_size)
        return self.state

    def __call__(self, streams: torch.Tensor, rows: StepRows) -> torch.Tensor:
        """F32 [M, S * H] -> the streams with the embedding added, F32 [M, S * H]."""
        row_ids = self.hashes.row_ids(self._history(rows))
        embedding = self.table.rows(row_ids.reshape(-1)).view(len(row_ids), -1)
        hidden_size = self.residual_size // self.num_streams
        keys, value = ops.split_columns(self.projection(embedding), self.residual_size, hidden_size)
        values = ops.ngram_values(self.key_norm(keys), self.query_norm(streams), value, self.scale)
        normed = self.conv_norm(values)
        context = ops.causal_conv(normed, self.conv, self.spec.conv_dilation, self.state.conv, rows)
        return ops.add(streams, ops.add(values, context))

    def _history(self, rows: StepRows) -> I64:
        """The last n tokens of every row, its own first, from this step's rows and from the ring: I64 [M, n]."""
        order, places = rows.runs.row_order, rows.runs.places_in_runs
        tokens = rows.token_ids.numpy()[order]
        slots, positions = rows.slots.numpy()[order], rows.positions.numpy()[order]
        ring = self.state.tokens.numpy()
        history = np.empty((len(tokens), self.spec.ngram_size), dtype=np.int64)
        for back in range(self.spec.ngram_size):
            at = np.maximum(np.arange(len(tokens)) - back, 0)
            kept = ring[slots, (positions - back) % ring.shape[1]]
            before = np.where(places >= back, tokens[at], kept)
            history[order, back] = np.where(positions >= back, before, self.spec.end_id)
        # Of a run longer than the ring the last rows stay. Each place once: of several values numpy keeps any.
        is_last = rows.runs.are_last(ring.shape[1])
        ring[slots[is_last], positions[is_last] % ring.shape[1]] = tokens[is_last]
        return history
