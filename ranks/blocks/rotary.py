"""Rotary position embedding; one for all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import ops
from ..rope import attention_factor, frequencies
from ..spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Rotary:
    """frequencies FP32 [R / 2]: the first R elements of a head are rotated."""

    frequencies: torch.Tensor
    attention_factor: float

    @classmethod
    def of(cls, spec: ModelSpec) -> Rotary:
        # Every value is an FP32 number already: the conversion from double is exact.
        exact = torch.tensor(frequencies(spec.rope, spec.rotary_dim), dtype=torch.float32)
        return cls(exact, attention_factor(spec.rope))

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """F32 [M, heads, D], positions I32 [M]."""
        return ops.rotary(x, positions, self.frequencies, self.attention_factor)
