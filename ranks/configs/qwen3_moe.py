"""The family qwen3_moe: fields as published with transformers' Qwen3MoeConfig, of versions 4 and 5."""

from __future__ import annotations

from ..rope import read_rope, refuse_partial_rotary
from ..spec import ATTENTION, ModelSpec
from .common import read_decoder, read_dense_layers, read_head_dim, read_num_layers
from .published import PublishedConfig


def read_qwen3_moe(config: PublishedConfig) -> ModelSpec:
    fields = config.text
    num_layers = read_num_layers(fields)
    head_dim = read_head_dim(fields)
    refuse_partial_rotary(fields)
    return read_decoder(
        config,
        head_dim=head_dim,
        rotary_dim=head_dim,
        rope=read_rope(fields),
        layer_kinds=(ATTENTION,) * num_layers,
        dense_layers=read_dense_layers(fields, num_layers),
        renormalise=fields.boolean("norm_topk_prob", False),
    )
