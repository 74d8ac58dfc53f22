"""Families whose blocks read a normed copy of one residual stream and add to it: qwen3_moe, qwen3_next, qwen3_5_moe."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import ops
from ..blocks.dense import DenseMLP
from ..blocks.experts import Experts
from ..blocks.norm import RMSNorm
from ..blocks.row_split import SplitHeads
from ..memory import BlockMemory, MemorySizes
from ..rows import StepRows
from .decoder import Family, FinalNorm, Parts


@dataclass(frozen=True, slots=True)
class PreNormLayer:
    token_mixer_norm: RMSNorm
    token_mixer: SplitHeads
    mlp_norm: RMSNorm
    mlp: DenseMLP | Experts

    def allocate(self, sizes: MemorySizes) -> list[BlockMemory]:
        return self.token_mixer.allocate(sizes)

    def __call__(self, residual: torch.Tensor, rows: StepRows) -> torch.Tensor:
        residual = ops.add(residual, self.token_mixer(self.token_mixer_norm(residual), rows))
        return ops.add(residual, self.mlp(self.mlp_norm(residual)))


def load_layer(parts: Parts, layer: int) -> PreNormLayer:
    weights, spec = parts.layer_weights(layer), parts.spec
    return PreNormLayer(
        token_mixer_norm=RMSNorm.load(weights, "input_layernorm", spec),
        token_mixer=parts.token_mixer(layer),
        mlp_norm=RMSNorm.load(weights, "post_attention_layernorm", spec),
        mlp=parts.mlp(layer),
    )


def load_final_norm(parts: Parts) -> FinalNorm:
    return RMSNorm.load(parts.weights, "norm", parts.spec)


PRE_NORM = Family(load_layer, load_final_norm)
