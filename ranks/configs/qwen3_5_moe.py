"""The family qwen3_5_moe, text: as qwen3_next, with DeltaNet's projections apart and experts in every layer."""

from __future__ import annotations

from ..spec import ATTENTION, DELTANET, ModelSpec
from .hybrid import MROPE_KEYS, read_hybrid
from .published import PublishedConfig


def read_qwen3_5_moe(config: PublishedConfig) -> ModelSpec:
    return read_hybrid(
        config,
        kind_names={"linear_attention": DELTANET, "full_attention": ATTENTION},
        output_gates=("silu",),
        rotary_factor=0.25,
        rope_keys_without_effect=MROPE_KEYS,
        fused_projections=False,
        dense_layers=(),
        renormalise=True,  # always: the family has no field for it
    )
