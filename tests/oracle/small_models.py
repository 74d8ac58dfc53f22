"""Random weights of small qwen3_moe models, the same bits on every machine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oracle.inputs import numbers
from oracle.model import Config

F32 = NDArray[np.float32]


def random_weights(config: Config, vocab_size: int, expert_size: int, seed: str, dense_size: int = 0) -> dict[str, F32]:
    """Weights of a small model, the same on every machine; dense_size is the width of dense MLP layers."""
    hidden = config.hidden_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {"model.embed_tokens": (vocab_size, hidden), "lm_head": (vocab_size, hidden), "model.norm": (hidden,)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.input_layernorm": (hidden,), f"{prefix}.post_attention_layernorm": (hidden,)}
        shapes |= {f"{prefix}.self_attn.{part}_norm": (config.head_dim,) for part in "qk"}
        shapes |= {f"{prefix}.self_attn.q_proj": (heads, hidden), f"{prefix}.self_attn.o_proj": (hidden, heads)}
        shapes |= {f"{prefix}.self_attn.{part}_proj": (kv_heads, hidden) for part in "kv"}
        if config.is_sparse(layer):
            shapes[f"{prefix}.mlp.gate"] = (config.num_experts, hidden)
        mlps = [f"experts.{i}." for i in range(config.num_experts)] if config.is_sparse(layer) else [""]
        width = expert_size if config.is_sparse(layer) else dense_size
        shapes |= {f"{prefix}.mlp.{mlp}{part}_proj": (width, hidden) for mlp in mlps for part in ("gate", "up")}
        shapes |= {f"{prefix}.mlp.{mlp}down_proj": (hidden, width) for mlp in mlps}
    return {f"{name}.weight": numbers(f"{seed}/{name}", shape) for name, shape in shapes.items()}
