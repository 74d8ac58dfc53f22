"""What the families share that mix DeltaNet layers with gated attention and add a shared expert to the chosen ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ..json_fields import JsonFields
from ..rope import read_rope, read_rotary_dim
from ..spec import (
    ATTENTION,
    DELTANET,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_REACH,
    MAX_WIDTH,
    DeltaNetSpec,
    ModelSpec,
)
from .common import read_decoder, read_head_dim, read_num_layers
from .published import PublishedConfig

HEAD_DIM = 256
"""Where config.json says nothing. These families do not derive it from the hidden size."""

MROPE_KEYS = ("mrope_section", "mrope_interleaved")
"""Which of three position grids an element of a head turns by. Text has the same position in all three."""


def read_hybrid(
    config: PublishedConfig,
    *,
    kind_names: Mapping[str, str],
    output_gates: Collection[str],
    rotary_factor: float,
    rope_keys_without_effect: Collection[str],
    fused_projections: bool,
    dense_layers: tuple[int, ...],
    renormalise: bool,
) -> ModelSpec:
    """`kind_names`: a layer's kind by its name in layer_types; `rotary_factor`: the share of a head that is rotated,
    where config.json does not say."""
    fields = config.text
    if not fields.boolean("attn_output_gate", True):
        raise fields.unsupported("attn_output_gate", "true")
    head_dim = read_head_dim(fields, HEAD_DIM)
    layer_kinds = read_layer_kinds(fields, kind_names)
    decoder = read_decoder(
        config,
        head_dim=head_dim,
        rotary_dim=read_rotary_dim(fields, head_dim, rotary_factor),
        rope=read_rope(fields, rope_keys_without_effect),
        layer_kinds=layer_kinds,
        dense_layers=dense_layers,
        renormalise=renormalise,
    )
    return replace(
        decoder,
        offset_norms=True,
        query_gate=True,
        shared_width=fields.integer("shared_expert_intermediate_size", maximum=MAX_WIDTH),
        deltanet=read_deltanet(fields, output_gates, fused_projections) if DELTANET in layer_kinds else None,
    )


def read_layer_kinds(fields: JsonFields, kind_names: Mapping[str, str]) -> tuple[str, ...]:
    """From layer_types; without them every full_attention_interval-th layer has attention, the others DeltaNet."""
    num_layers = read_num_layers(fields)
    if not fields.has("layer_types"):
        interval = fields.integer("full_attention_interval", 4, maximum=MAX_LAYERS)
        return tuple(DELTANET if (layer + 1) % interval else ATTENTION for layer in range(num_layers))
    names = fields.texts("layer_types")
    if len(names) != num_layers:
        raise fields.wrong("layer_types", f"a list of num_hidden_layers = {num_layers} kinds, not of {len(names)}")
    unknown = sorted(set(names).difference(kind_names))
    if unknown:
        raise fields.wrong("layer_types", f"kinds of {', '.join(kind_names)}, not {unknown[0][:40]!r}")
    return tuple(kind_names[name] for name in names)


def read_deltanet(fields: JsonFields, output_gates: Collection[str], fused_projections: bool) -> DeltaNetSpec:
    num_key_heads = fields.integer("linear_num_key_heads", maximum=MAX_HEADS)
    num_value_heads = fields.integer("linear_num_value_heads", maximum=MAX_HEADS)
    if num_value_heads % num_key_heads:
        raise fields.wrong("linear_num_value_heads", f"a multiple of linear_num_key_heads = {num_key_heads}")
    output_gate = fields.text("output_gate_type", fields.text("hidden_act", "silu"))
    if output_gate not in output_gates:
        raise fields.unsupported("output_gate_type", " or ".join(output_gates))
    return DeltaNetSpec(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=fields.integer("linear_key_head_dim", maximum=MAX_HEAD_DIM),
        value_dim=fields.integer("linear_value_head_dim", maximum=MAX_HEAD_DIM),
        conv_taps=fields.integer("linear_conv_kernel_dim", 4, maximum=MAX_REACH + 1),
        output_gate=output_gate,
        fused_projections=fused_projections,
    )
