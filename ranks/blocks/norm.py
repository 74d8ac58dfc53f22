"""RMSNorm over the last axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import ops
from ..spec import ModelSpec
from ..weights import Weights


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """weight FP32 [N], or [groups, N] for vectors that come in groups; `is_offset`: what is stored lacks one."""

    weight: torch.Tensor
    eps: float
    is_offset: bool

    @classmethod
    def load(cls, weights: Weights, name: str, spec: ModelSpec) -> RMSNorm:
        return cls(weights.fp32(f"{name}.weight"), spec.rms_norm_eps, spec.offset_norms)

    @classmethod
    def load_grouped(cls, weights: Weights, name: str, spec: ModelSpec, num_groups: int) -> RMSNorm:
        """One norm for each of num_groups equal parts of a row."""
        weight = weights.fp32(f"{name}.weight").view(num_groups, -1)
        return cls(weight, spec.rms_norm_eps, spec.offset_norms)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """F32 [..., N] -> F32 [..., N]; grouped: [M, groups * N] -> the same."""
        return ops.rms_norm(x, self.weight, self.eps, self.is_offset)
