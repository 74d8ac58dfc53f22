"""What the engine asks of a model, whatever its family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from .. import ops
from ..memory import MemorySizes, ModelMemory
from ..rows import StepRows
from ..spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Residual:
    """rows F32 [M, R]: the final residual (all streams), before the last norm, equal on every rank.

    first_bad_layer I64 [M]: the first layer whose output is not finite in this row, -1 where all are.
    layer_hashes U64 [M, layers]: the hash of the residual after every layer; no columns unless they were asked for.
    """

    rows: torch.Tensor
    first_bad_layer: NDArray[np.int64]
    layer_hashes: NDArray[np.uint64]


class ResidualWatch:
    """What is to be known of the residual after each layer, whatever the family."""

    def __init__(self, positions: torch.Tensor, with_hashes: bool) -> None:
        self._positions = positions
        self._with_hashes = with_hashes
        self._is_bad: list[NDArray[np.bool_]] = []
        self._hashes: list[NDArray[np.uint64]] = []

    def after_layer(self, residual: torch.Tensor) -> None:
        self._is_bad.append(ops.nonfinite_rows(residual))
        if self._with_hashes:
            self._hashes.append(ops.residual_hash(residual, self._positions))

    def final(self, residual: torch.Tensor) -> Residual:
        num_rows = len(self._positions)
        is_bad = np.stack(self._is_bad) if self._is_bad else np.zeros((1, num_rows), dtype=np.bool_)
        first_bad_layer = np.where(is_bad.any(axis=0), is_bad.argmax(axis=0), -1)
        hashes = np.stack(self._hashes, axis=1) if self._hashes else np.empty((num_rows, 0), dtype=np.uint64)
        return Residual(residual, first_bad_layer, hashes)


class CausalModel(Protocol):
    """One rank's share of a model.

    vocab_ranges: the ids (first, stop) of every rank. `allocate` comes before the first rows.
    """

    spec: ModelSpec
    vocab_ranges: tuple[tuple[int, int], ...]

    @property
    def num_exchanges(self) -> int:
        """Exchanges with other ranks since the model was built."""

    @property
    def exchange_mode(self) -> str:
        """What the exchanges of its sums use: "nodes" or "slots", or which sum uses which where they differ."""

    def allocate(self, sizes: MemorySizes) -> ModelMemory:
        """Memory for slots and pages, in place of what was there; the model goes on using it."""

    def forward(self, rows: StepRows) -> Residual:
        """Takes the rows into its memory, and gives their final residual. All ranks must call it with equal rows."""

    def logits(self, residual_rows: torch.Tensor) -> torch.Tensor:
        """F32 [D, R] -> F32 [D, own vocabulary rows]."""
