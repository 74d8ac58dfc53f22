"""The gated MLP of layers without experts, whole on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import ops
from ..linear import Linear
from ..weights import Weights


@dataclass(frozen=True, slots=True)
class DenseMLP:
    gate: Linear
    up: Linear
    down: Linear

    @classmethod
    def load(cls, weights: Weights) -> DenseMLP:
        parts = [Linear.wide(weights.linear(f"{name}_proj.weight")) for name in ("gate", "up", "down")]
        return cls(*parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """F32 [M, H] -> F32 [M, H]."""
        return self.down(ops.swiglu(self.gate(x), self.up(x)))
