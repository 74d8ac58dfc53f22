"""Token embedding, whole on every rank: splitting it would cost an exchange a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import ops
from ..weights import WeightReader


@dataclass(frozen=True, slots=True)
class Embedding:
    """table [V, H] as stored; its rows are not rounded to the compute dtype, also where the head is tied to them."""

    table: torch.Tensor

    @classmethod
    def load(cls, reader: WeightReader, name: str) -> Embedding:
        return cls(reader.read(name))

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """I64 [M] -> F32 [M, H]."""
        return ops.widen(self.table[token_ids])
