"""What the engine asks of a model, whatever its family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ..kv import KVPages
from ..rows import StepRows
from ..spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Residual:
    """rows F32 [M, H]: the final residual, before the last norm, equal on every rank.

    first_bad_layer I32 [M]: the first layer whose output is not finite in this row, -1 where all are.
    """

    rows: torch.Tensor
    first_bad_layer: torch.Tensor


class CausalModel(Protocol):
    """One rank's share of a model.

    kv_heads: the global KV heads it keeps, maybe none; vocab_ranges: the ids (first, stop) of every rank.
    """

    spec: ModelSpec
    kv_heads: tuple[int, ...]
    vocab_ranges: tuple[tuple[int, int], ...]

    @property
    def num_exchanges(self) -> int:
        """Exchanges with other ranks since the model was built."""

    @property
    def exchange_mode(self) -> str:
        """What the exchanges of experts and of attention leaves use: "nodes" or "slots", or both where they differ."""

    def forward(self, rows: StepRows, kv: KVPages) -> Residual:
        """Stores the rows' keys and values, and gives their final residual. All ranks must call it with equal rows."""

    def logits(self, residual_rows: torch.Tensor) -> torch.Tensor:
        """F32 [D, H] -> F32 [D, own vocabulary rows]."""
