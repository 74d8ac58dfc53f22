"""What every family's config.json says in the same fields: sizes, heads, experts, and what no family may ask for."""

from __future__ import annotations

from ..json_fields import JsonFields
from ..rope import MAX_POSITIONS, RopeSpec
from ..spec import (
    MAX_EXPERTS,
    MAX_EXPERTS_IN_ALL,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    ModelSpec,
)
from .published import PublishedConfig


def read_decoder(
    config: PublishedConfig,
    *,
    head_dim: int,
    rotary_dim: int,
    rope: RopeSpec,
    layer_kinds: tuple[str, ...],
    dense_layers: tuple[int, ...],
    renormalise: bool,
) -> ModelSpec:
    """A ModelSpec of attention and experts; what else a family has, it adds with dataclasses.replace."""
    fields = config.text
    refuse_options(config)
    num_heads = fields.integer("num_attention_heads", maximum=MAX_HEADS)
    num_kv_heads = fields.integer("num_key_value_heads", maximum=MAX_HEADS)
    if num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads = {num_heads}")
    num_experts = _num_experts(fields)
    top_k = fields.integer("num_experts_per_tok", maximum=MAX_EXPERTS)
    if top_k > num_experts:
        raise fields.wrong("num_experts_per_tok", f"at most the number of experts, {num_experts}")
    if (len(layer_kinds) - len(dense_layers)) * num_experts > MAX_EXPERTS_IN_ALL:
        most = f"at most {MAX_EXPERTS_IN_ALL:,} experts in all, so {MAX_EXPERTS_IN_ALL // num_experts:,} layers with"
        raise fields.wrong("num_hidden_layers", f"{most} {num_experts:,} experts")
    return ModelSpec(
        family=config.family,
        vocab_size=fields.integer("vocab_size", maximum=MAX_VOCAB),
        hidden_size=fields.integer("hidden_size", maximum=MAX_WIDTH),
        num_layers=len(layer_kinds),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        attention_bias=fields.boolean("attention_bias", False),
        num_experts=num_experts,
        top_k=top_k,
        renormalise=renormalise,
        expert_width=fields.integer("moe_intermediate_size", maximum=MAX_WIDTH),
        dense_width=fields.integer("intermediate_size", maximum=MAX_WIDTH) if dense_layers else 0,
        dense_layers=dense_layers,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, below=1.0),
        tied_embeddings=config.tied_embeddings(),
        rope=rope,
        max_context=fields.integer("max_position_embeddings", 32768, maximum=MAX_POSITIONS),
        eos_ids=config.eos_fields().integers("eos_token_id"),
        layer_kinds=layer_kinds,
        rotary_dim=rotary_dim,
        tensor_prefix=config.tensor_prefix,
    )


def refuse_options(config: PublishedConfig) -> None:
    if config.text.text("hidden_act", "silu") != "silu":
        raise config.text.unsupported("hidden_act", "silu")
    if config.text.boolean("use_sliding_window", False):
        raise config.text.unsupported("use_sliding_window", "false")
    for fields in (config.whole, config.text):
        if fields.has("quantization_config"):
            raise fields.unsupported("quantization_config", "none (weights in float32, bfloat16 or float16)")


def read_head_dim(fields: JsonFields, default: int | None = None) -> int:
    """`default` None: what the hidden size leaves for a head."""
    if default is None:
        hidden_size = fields.integer("hidden_size", maximum=MAX_WIDTH)
        default = hidden_size // fields.integer("num_attention_heads", maximum=MAX_HEADS)
    head_dim = fields.integer("head_dim", default, maximum=MAX_HEAD_DIM)
    if head_dim % 2:
        raise fields.wrong("head_dim", "an even number (rotary pairs), given or as hidden_size / num_attention_heads")
    return head_dim


def read_num_layers(fields: JsonFields) -> int:
    return fields.integer("num_hidden_layers", maximum=MAX_LAYERS)


def read_dense_layers(fields: JsonFields, num_layers: int) -> tuple[int, ...]:
    """Layers in mlp_only_layers, and those that decoder_sparse_step skips."""
    listed = set(fields.integers("mlp_only_layers"))
    step = fields.integer("decoder_sparse_step", 1, maximum=MAX_LAYERS)
    return tuple(layer for layer in range(num_layers) if layer in listed or (layer + 1) % step)


def _num_experts(fields: JsonFields) -> int:
    """Published as num_experts, written by transformers 5 as num_local_experts."""
    names = [name for name in ("num_experts", "num_local_experts") if fields.has(name)]
    counts = {fields.integer(name, maximum=MAX_EXPERTS) for name in names or ["num_experts"]}
    if len(counts) > 1:
        raise fields.wrong("num_local_experts", f"num_experts = {fields.values['num_experts']}")
    return counts.pop()
