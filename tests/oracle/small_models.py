"""Random weights of small models, the same bits on every machine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oracle.config import Config, DeltaNet, Hyper, Ngram
from oracle.inputs import numbers
from oracle.ngram import table_sizes

F32 = NDArray[np.float32]
Shapes = dict[str, tuple[int, ...]]


def random_weights(config: Config, vocab_size: int, expert_size: int, seed: str, dense_size: int = 0) -> dict[str, F32]:
    """Weights of a small model, the same on every machine; dense_size is the width of dense MLP layers."""
    hidden = config.hidden_size
    shapes: Shapes = {"model.embed_tokens": (vocab_size, hidden), "lm_head": (vocab_size, hidden)}
    if config.hyper:
        shapes |= _under("model.hyper_connection_mixer", _mixer(config.hyper, hidden))
    else:
        shapes["model.norm"] = (hidden,)
    for layer in range(config.num_layers):
        shapes |= _under(f"model.layers.{layer}", _layer(config, layer, expert_size, dense_size))
    weights = {f"{name}.weight": numbers(f"{seed}/{name}", shape) for name, shape in shapes.items()}
    return weights | _decays(config, seed)


def _under(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _layer(config: Config, layer: int, expert_size: int, dense_size: int) -> Shapes:
    hidden, shapes = config.hidden_size, {}
    if config.deltanet and layer in config.deltanet.layers:
        shapes |= _under("linear_attn", _deltanet(config.deltanet, hidden))
    else:
        shapes |= _under("self_attn", _attention(config))
    if config.ngram and layer in config.ngram.layers:
        shapes |= _under("ple", _ngram(config.ngram, config.ngram.layers.index(layer), hidden, config.num_streams))
    if config.hyper:
        inject = {"block_inject_weight": (config.num_streams, config.num_streams * hidden)}
        for block in ("attn", "mlp"):
            shapes |= _under(f"{block}_hyper_connection", _mixer(config.hyper, hidden) | inject)
    else:
        shapes |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    return shapes | _under("mlp", _mlp(config, layer, expert_size, dense_size))


def _attention(config: Config) -> Shapes:
    hidden, head_dim, indexer = config.hidden_size, config.head_dim, config.indexer
    heads, kv_heads = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: Shapes = {f"{part}_norm": (head_dim,) for part in "qk"}
    shapes |= {"q_proj": (heads * (2 if config.query_gate else 1), hidden), "o_proj": (hidden, heads)}
    shapes |= {f"{part}_proj": (kv_heads, hidden) for part in "kv"}
    if indexer:
        shapes["indexer.index_qk_proj"] = ((indexer.num_heads + 1) * indexer.head_dim, hidden)
        shapes |= {f"indexer.{part}_layernorm": (indexer.head_dim,) for part in "qk"}
    return shapes


def _mlp(config: Config, layer: int, expert_size: int, dense_size: int) -> Shapes:
    hidden = config.hidden_size
    if not config.is_sparse(layer):
        return _gated("", dense_size, hidden)
    shapes: Shapes = {"gate": (config.num_experts, hidden)}
    for expert in range(config.num_experts):
        shapes |= _gated(f"experts.{expert}.", expert_size, hidden)
    if config.shared_expert:
        shapes |= {"shared_expert_gate": (1, hidden)} | _gated("shared_expert.", expert_size, hidden)
    return shapes


def _gated(prefix: str, width: int, hidden: int) -> Shapes:
    shapes: Shapes = {f"{prefix}{part}_proj": (width, hidden) for part in ("gate", "up")}
    return shapes | {f"{prefix}down_proj": (hidden, width)}


def _deltanet(deltanet: DeltaNet, hidden: int) -> Shapes:
    keys, values = deltanet.num_key_heads * deltanet.key_dim, deltanet.num_value_heads * deltanet.value_dim
    widths = {"qkv": 2 * keys + values, "z": values, "b": deltanet.num_value_heads, "a": deltanet.num_value_heads}
    if deltanet.fused_projections:
        widths = {"qkvz": 2 * keys + 2 * values, "ba": 2 * deltanet.num_value_heads}
    return {
        **{f"in_proj_{part}": (width, hidden) for part, width in widths.items()},
        "conv1d": (2 * keys + values, 1, deltanet.num_taps),
        "norm": (deltanet.value_dim,),
        "out_proj": (hidden, values),
    }


def _mixer(hyper: Hyper, hidden: int) -> Shapes:
    wide = hyper.num_streams * hidden
    return {
        "hc_norm": (wide,),
        "input_mix_weight_down": (hyper.low_rank, wide),
        "input_mix_weight_up": (wide, hyper.low_rank),
    }


def _ngram(ngram: Ngram, layer_index: int, hidden: int, num_streams: int) -> Shapes:
    num_heads, wide = (ngram.ngram_size - 1) * ngram.heads_per_ngram, num_streams * hidden
    num_rows = sum(table_sizes(num_heads, layer_index, ngram.vocab_base))
    return {
        "ple_embedding.ngram_embedding": (num_rows, ngram.embed_dim // num_heads),
        "key_proj": (wide, ngram.embed_dim),
        "value_proj": (hidden, ngram.embed_dim),
        **{f"norm_{part}": (wide,) for part in ("key", "query", "conv")},
        "conv1d": (wide, 1, ngram.num_taps),
    }


def _decays(config: Config, seed: str) -> dict[str, F32]:
    """A_log and dt_bias, such that a state outlives the rows between two borders."""
    made: dict[str, F32] = {}
    if config.deltanet is None:
        return made
    for layer in config.deltanet.layers:
        name, shape = f"model.layers.{layer}.linear_attn", (config.deltanet.num_value_heads,)
        made[f"{name}.A_log"] = numbers(f"{seed}/{name}/A_log", shape)
        made[f"{name}.dt_bias"] = numbers(f"{seed}/{name}/dt_bias", shape) - np.float32(8)
    return made
