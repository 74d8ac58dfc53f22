"""The family qwen3_next: DeltaNet (projections stored by key head) and gated attention, experts and a shared one."""

from __future__ import annotations

from ..spec import ATTENTION, DELTANET, ModelSpec
from .common import read_dense_layers, read_num_layers
from .hybrid import read_hybrid
from .published import PublishedConfig


def read_qwen3_next(config: PublishedConfig) -> ModelSpec:
    fields = config.text
    return read_hybrid(
        config,
        kind_names={"linear_attention": DELTANET, "full_attention": ATTENTION},
        output_gates=("silu",),
        rotary_factor=0.25,
        rope_keys_without_effect=(),
        fused_projections=True,
        dense_layers=read_dense_layers(fields, read_num_layers(fields)),
        renormalise=fields.boolean("norm_topk_prob", True),
    )
