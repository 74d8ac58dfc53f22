"""The tensors a family's checkpoint must hold: names and shapes. What they come to, `footprint` says.

Imports no torch: `Checkpoint.check` and `leafsum inspect` use it in processes that compute nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .checkpoint import BUFFER_NAMES, TensorEntry
from .ngram_tables import padded_rows
from .spec import ATTENTION, DeltaNetSpec, ModelSpec

Shape = tuple[int, ...]

HEAD = "lm_head.weight"
TABLE = "ple.ple_embedding.ngram_embedding"
"""An n-gram table: TABLE.weight, or TABLE.shard_0.weight and so on, in the order of its rows."""


def layer_name(spec: ModelSpec, layer: int, name: str) -> str:
    return f"{spec.tensor_prefix}layers.{layer}.{name}"


def embedding_name(spec: ModelSpec) -> str:
    return f"{spec.tensor_prefix}embed_tokens.weight"


def final_norm_name(spec: ModelSpec) -> str:
    """Models with hyper-connections have none: their last mixer takes its place."""
    return f"{spec.tensor_prefix}norm.weight"


def fused_experts(spec: ModelSpec, layer: int) -> tuple[str, str]:
    """gate_up_proj [E, 2 * width, hidden] (gate rows first) and down_proj [E, hidden, width]."""
    return layer_name(spec, layer, "mlp.experts.gate_up_proj"), layer_name(spec, layer, "mlp.experts.down_proj")


def table_names(spec: ModelSpec, layer: int, present: Mapping[str, TensorEntry]) -> tuple[str, ...]:
    """The tensors of a layer's n-gram table, in the order of their rows: one, or as many shards as are numbered."""
    return shard_names(layer_name(spec, layer, TABLE), present)


def shard_names(table: str, present: Collection[str]) -> tuple[str, ...]:
    shards: list[str] = []
    while (name := f"{table}.shard_{len(shards)}.weight") in present:
        shards.append(name)
    return tuple(shards) or (f"{table}.weight",)


def ignored_prefixes(spec: ModelSpec) -> tuple[str, ...]:
    """What a checkpoint of this family may hold beside the text model, and no rank reads: vision, draft layers."""
    if spec.family == "qwen3_moe":
        return ()
    return ("model.visual.", "mtp.")


def expected_tensors(spec: ModelSpec, present: Mapping[str, TensorEntry]) -> dict[str, Shape]:
    """Shape by name.

    `present` (the checkpoint's entries) decides only between published layouts: a layer's experts one by one or fused,
    an n-gram table whole or in shards, whether buffers of the n-gram embedding are stored, and whether a tied model
    carries its head as well.
    """
    shapes: dict[str, Shape] = {embedding_name(spec): (spec.vocab_size, spec.hidden_size)}
    if spec.hyper is None:
        shapes[final_norm_name(spec)] = (spec.hidden_size,)
    else:
        mixer = _mixer_shapes("hyper_connection_mixer.", spec, injects=False)
        shapes |= {f"{spec.tensor_prefix}{name}": shape for name, shape in mixer.items()}
    if not spec.tied_embeddings or HEAD in present:
        shapes[HEAD] = (spec.vocab_size, spec.hidden_size)
    dense_layers = frozenset(spec.dense_layers)
    for layer in range(spec.num_layers):
        parts = _attention_shapes(spec) if spec.layer_kinds[layer] == ATTENTION else _deltanet_shapes(spec)
        if layer in dense_layers:
            parts |= _gated_shapes("mlp.", spec.dense_width, spec.hidden_size)
        else:
            parts |= _expert_shapes(spec, fused_experts(spec, layer)[0] in present)
        parts |= _around_blocks(spec)
        shapes |= {layer_name(spec, layer, name): shape for name, shape in parts.items()}
    if spec.ngram is not None:
        for index, layer in enumerate(spec.ngram.layers):
            shapes |= _ngram_shapes(spec, index, layer, present)
    return shapes


def _around_blocks(spec: ModelSpec) -> dict[str, Shape]:
    if spec.hyper is None:
        return {f"{name}.weight": (spec.hidden_size,) for name in ("input_layernorm", "post_attention_layernorm")}
    return _mixer_shapes("attn_hyper_connection.", spec) | _mixer_shapes("mlp_hyper_connection.", spec)


def _mixer_shapes(prefix: str, spec: ModelSpec, injects: bool = True) -> dict[str, Shape]:
    assert spec.hyper is not None
    streams, low_rank = spec.residual_size, spec.hyper.low_rank
    shapes: dict[str, Shape] = {
        "hc_norm": (streams,),
        "input_mix_weight_down": (low_rank, streams),
        "input_mix_weight_up": (streams, low_rank),
    }
    if injects:
        shapes["block_inject_weight"] = (spec.hyper.num_streams, streams)
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def _attention_shapes(spec: ModelSpec) -> dict[str, Shape]:
    query_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    linears = {
        "q_proj": (query_width * (2 if spec.query_gate else 1), spec.hidden_size),
        "k_proj": (kv_width, spec.hidden_size),
        "v_proj": (kv_width, spec.hidden_size),
        "o_proj": (spec.hidden_size, query_width),
    }
    shapes: dict[str, Shape] = {f"self_attn.{name}.weight": shape for name, shape in linears.items()}
    shapes |= {f"self_attn.{name}.weight": (spec.head_dim,) for name in ("q_norm", "k_norm")}
    if spec.attention_bias:
        shapes |= {f"self_attn.{name}.bias": shape[:1] for name, shape in linears.items()}
    if spec.indexer is not None:
        head_dim = spec.indexer.head_dim
        width = (spec.indexer.num_heads + 1) * head_dim
        shapes["self_attn.indexer.index_qk_proj.weight"] = (width, spec.hidden_size)
        shapes |= {f"self_attn.indexer.{name}_layernorm.weight": (head_dim,) for name in ("q", "k")}
    return shapes


def _deltanet_shapes(spec: ModelSpec) -> dict[str, Shape]:
    deltanet = spec.deltanet
    assert deltanet is not None
    heads, hidden = deltanet.num_value_heads, spec.hidden_size
    value_width = heads * deltanet.value_dim
    channels = 2 * deltanet.num_key_heads * deltanet.key_dim + value_width
    shapes: dict[str, Shape] = {
        "conv1d.weight": (channels, 1, deltanet.conv_taps),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (deltanet.value_dim,),
        "out_proj.weight": (hidden, value_width),
    }
    shapes |= {f"in_proj_{name}.weight": (rows, hidden) for name, rows in _projections(deltanet, channels).items()}
    return {f"linear_attn.{name}": shape for name, shape in shapes.items()}


def _projections(deltanet: DeltaNetSpec, channels: int) -> dict[str, int]:
    """Rows by name."""
    heads = deltanet.num_value_heads
    value_width = heads * deltanet.value_dim
    if deltanet.fused_projections:
        return {"qkvz": channels + value_width, "ba": 2 * heads}
    return {"qkv": channels, "z": value_width, "b": heads, "a": heads}


def _expert_shapes(spec: ModelSpec, is_fused: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {"mlp.gate.weight": (spec.num_experts, spec.hidden_size)}
    if spec.shared_width:
        shapes |= _gated_shapes("mlp.shared_expert.", spec.shared_width, spec.hidden_size)
        shapes["mlp.shared_expert_gate.weight"] = (1, spec.hidden_size)
    if is_fused:
        shapes["mlp.experts.gate_up_proj"] = (spec.num_experts, 2 * spec.expert_width, spec.hidden_size)
        shapes["mlp.experts.down_proj"] = (spec.num_experts, spec.hidden_size, spec.expert_width)
        return shapes
    for expert in range(spec.num_experts):
        shapes |= _gated_shapes(f"mlp.experts.{expert}.", spec.expert_width, spec.hidden_size)
    return shapes


def _gated_shapes(prefix: str, width: int, hidden_size: int) -> dict[str, Shape]:
    return {
        f"{prefix}gate_proj.weight": (width, hidden_size),
        f"{prefix}up_proj.weight": (width, hidden_size),
        f"{prefix}down_proj.weight": (hidden_size, width),
    }


def _ngram_shapes(spec: ModelSpec, index: int, layer: int, present: Mapping[str, TensorEntry]) -> dict[str, Shape]:
    ngram = spec.ngram
    assert ngram is not None
    streams = spec.residual_size
    parts: dict[str, Shape] = {
        "ple.key_proj.weight": (streams, ngram.embed_dim),
        "ple.value_proj.weight": (spec.hidden_size, ngram.embed_dim),
        "ple.conv1d.weight": (streams, 1, ngram.conv_taps),
    }
    parts |= {f"ple.norm_{name}.weight": (streams,) for name in ("key", "query", "conv")}
    shapes = {layer_name(spec, layer, name): shape for name, shape in parts.items()}
    lengths = {"layer_multipliers": ngram.ngram_size}
    for buffer in BUFFER_NAMES:
        name = layer_name(spec, layer, f"ple.ple_embedding.{buffer}")
        if name in present:
            shapes[name] = (lengths.get(buffer, ngram.num_heads),)
    return shapes | _table_shapes(table_names(spec, layer, present), ngram.head_dim, padded_rows(ngram, index), present)


def _table_shapes(
    names: tuple[str, ...], width: int, num_rows: int, present: Mapping[str, TensorEntry]
) -> dict[str, Shape]:
    """Shards may be of any lengths from one row up, and the last one has the rows that the others leave."""
    shapes: dict[str, Shape] = {}
    for name in names[:-1]:
        rows = max(1, min(present[name].shape[0], num_rows) if present[name].shape else 1)
        shapes[name] = (rows, width)
        num_rows -= rows
    return shapes | {names[-1]: (max(1, num_rows), width)}
