"""The rows of the vocabulary that a rank owns."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..linear import Linear
from ..weights import Part, WeightReader


@dataclass(frozen=True, slots=True)
class Head:
    vocab_rows: Linear

    @classmethod
    def load(cls, reader: WeightReader, name: str, vocab_range: Part) -> Head:
        """`name` is the embedding's where the head is tied to it. An empty range gives logits of no columns."""
        return cls(Linear.wide(reader.linear(name, rows=vocab_range)))

    def __call__(self, final_rows: torch.Tensor) -> torch.Tensor:
        """F32 [D, H] -> F32 [D, own vocabulary rows]."""
        return self.vocab_rows(final_rows)
