"""The model that is measured: random weights of the family qwen3_moe, 206 MB of bfloat16, the same on every machine.

Its proportions are those of published models: most weights are in experts of which a token meets one in eight, and
one decode step reads 57 MB, far more than a core's own caches hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...ranks.tiny import write_safetensors
from ...ranks.user_cache import made_once

VERSION = 1
"""Of the content: the folder's name. A change of any weight below is a new version."""

SEED = 14
EMBEDDING = "model.embed_tokens.weight"
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "vocab_size": 16384,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "use_sliding_window": False,
}

U16 = NDArray[np.uint16]
ONE = 0x3F80
"""1.0 in bfloat16."""


def ensure_bench_model() -> Path:
    """The model's folder in the user's cache, made on first use in a few seconds. ConfigError where it cannot be."""
    return made_once("the model to measure", f"bench-{VERSION}", lambda folder: write_model(folder, CONFIG))


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """A model folder of that config.json: one safetensors file, no tokenizer."""
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    words = np.random.Philox(key=SEED)
    tensors = {name: _weights(words, shape, name == EMBEDDING) for name, shape in _shapes(config)}
    write_safetensors(folder / "model.safetensors", tensors)


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor's name and shape, in the order in which its random words are drawn."""
    hidden, width, experts = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    head_dim = config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    yield EMBEDDING, (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}self_attn.q_proj.weight", (queries, hidden)
        yield f"{prefix}self_attn.k_proj.weight", (keys, hidden)
        yield f"{prefix}self_attn.v_proj.weight", (keys, hidden)
        yield f"{prefix}self_attn.q_norm.weight", (head_dim,)
        yield f"{prefix}self_attn.k_norm.weight", (head_dim,)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, queries)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}mlp.gate.weight", (experts, hidden)
        for expert in range(experts):
            for part in ("gate", "up"):
                yield f"{prefix}mlp.experts.{expert}.{part}_proj.weight", (width, hidden)
            yield f"{prefix}mlp.experts.{expert}.down_proj.weight", (hidden, width)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


def _weights(words: np.random.Philox, shape: tuple[int, ...], is_embedding: bool) -> U16:
    """Norms of one; else uniform values of variance 1 / columns, as bfloat16 bits.

    An embedding has variance 4: each token then tells in the next, and greedy text does not stand still (64 different
    tokens after a random prompt), so that steps differ in the experts they read.
    Sixteen random bits make a value: one IEEE product each, then the low half is cut off, so no library takes part.
    """
    if len(shape) == 1:
        return np.full(shape, ONE, dtype=np.uint16)
    num_values = shape[0] * shape[1]
    raw = words.random_raw(-(-num_values // 4)).astype("<u8").view(np.uint16)[:num_values]
    scale = np.float32((12 if is_embedding else 3 / shape[1]) ** 0.5 / 32768)
    values = (raw.astype(np.int32) - 32768).astype(np.float32) * scale
    return (values.view(np.uint32) >> np.uint32(16)).astype("<u2").reshape(shape)
