"""The final norm and the rows of the vocabulary that a rank owns."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..linear import Linear
from ..weights import Part, WeightReader
from .norm import RMSNorm


@dataclass(frozen=True, slots=True)
class Head:
    norm: RMSNorm
    vocab_rows: Linear

    @classmethod
    def load(cls, reader: WeightReader, norm: RMSNorm, name: str, vocab_range: Part) -> Head:
        """`name` is the embedding's where the head is tied to it. An empty range gives logits of no columns."""
        return cls(norm, Linear.wide(reader.linear(name, rows=vocab_range)))

    def __call__(self, residual_rows: torch.Tensor) -> torch.Tensor:
        """F32 [D, H] -> F32 [D, own vocabulary rows]."""
        return self.vocab_rows(self.norm(residual_rows))
