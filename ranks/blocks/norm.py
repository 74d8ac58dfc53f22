"""RMSNorm over the last axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import ops
from ..weights import WeightReader


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """weight FP32 [N]."""

    weight: torch.Tensor
    eps: float

    @classmethod
    def load(cls, reader: WeightReader, name: str, eps: float) -> RMSNorm:
        return cls(reader.fp32(name), eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """F32 [..., N] -> F32 [..., N]."""
        return ops.rms_norm(x, self.weight, self.eps)
