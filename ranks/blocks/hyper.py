"""Hyper-connections: a block reads a mix of the residual streams and writes to all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import ops
from ..linear import Linear
from ..spec import HyperSpec, ModelSpec
from ..weights import Weights
from .norm import RMSNorm


@dataclass(frozen=True, slots=True)
class Mixer:
    """down: the low-rank values and, where the mixer has them, one injection weight a stream, as one narrow linear."""

    spec: HyperSpec
    norm: RMSNorm
    down: Linear
    up: Linear

    @classmethod
    def load(cls, weights: Weights, spec: ModelSpec, hyper: HyperSpec, *, with_injection: bool) -> Mixer:
        down = [weights.linear("input_mix_weight_down.weight")]
        if with_injection:
            down.append(weights.linear("block_inject_weight.weight"))
        return cls(
            spec=hyper,
            norm=RMSNorm.load_grouped(weights, "hc_norm", spec, hyper.num_streams),
            down=Linear.narrow(torch.cat(down)),
            up=Linear.narrow(weights.linear("input_mix_weight_up.weight")),
        )

    def __call__(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """F32 [M, S * H] -> the mixed row F32 [M, H], injection weights F32 [M, S] ([M, 0] where it has none)."""
        normed = self.norm(streams)
        inner, weights = ops.hyper_gates(self.down(normed), self.spec.num_streams, self.spec.low_rank)
        return ops.hyper_mix(self.up(inner), normed, self.spec.num_streams), weights
