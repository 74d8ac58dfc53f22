"""The models that are measured, one a family: random bfloat16 weights, the same on every machine.

Their proportions are those of published models: most weights are in experts of which a token meets one in eight, and
one decode step reads far more than a core's own caches hold: 57 MB of 206 (qwen3_moe), 61 MB of 153 (qwen4_exp).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...ranks.configs.load import load_spec
from ...ranks.sizes import expected_tensors
from ...ranks.spec import ModelSpec
from ...ranks.tiny import write_safetensors
from ...ranks.user_cache import made_once

VERSION = 2
"""Of the content: the folder's name. A change of any weight below is a new version."""

SEED = 14
COMMON: dict[str, Any] = {
    "dtype": "bfloat16",
    "vocab_size": 16384,
    "hidden_size": 512,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}
CONFIGS: dict[str, dict[str, Any]] = {  # by family
    "qwen3_moe": COMMON
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "use_sliding_window": False,
    },
    "qwen4_exp": COMMON
    | {
        "architectures": ["Qwen4ExpForCausalLM"],
        "model_type": "qwen4_exp_text",
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "output_gate_type": "sigmoid",
        "shared_expert_intermediate_size": 96,
        "hc_count": 4,
        "hc_lowrank": 64,
        "ple_layer_ids": [2],
        "ngram_vocab_size_base": 8192,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 64,
        # So small that decode steps choose keys, and so do most rows of a long prompt.
        "indexer_budget": 128,
        "indexer_compress_ratio": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
        "eos_token_id": 0,
    },
}
U16 = NDArray[np.uint16]
ONE = 0x3F80
"""1.0 in bfloat16."""


def ensure_bench_model(family: str) -> Path:
    """The model's folder in the user's cache, made on first use in a few seconds. ConfigError where it cannot be."""
    config = CONFIGS[family]
    return made_once("the model to measure", f"bench-{family}-{VERSION}", lambda folder: write_model(folder, config))


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """A model folder of that config.json, of any family: one safetensors file, no tokenizer."""
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    spec, words = load_spec(folder), np.random.Philox(key=SEED)
    shapes = expected_tensors(spec, {})
    write_safetensors(
        folder / "model.safetensors", {name: _weights(words, spec, name, shapes[name]) for name in shapes}
    )


def _weights(words: np.random.Philox, spec: ModelSpec, name: str, shape: tuple[int, ...]) -> U16:
    """Norms of one; else uniform values of variance 1 / columns, as bfloat16 bits.

    An embedding has variance 4: each token then tells in the next, and greedy text does not stand still (64 different
    tokens after a random prompt), so that steps differ in the experts they read.
    Sixteen random bits make a value: one IEEE product each, then the low half is cut off, so no library takes part.
    """
    if "norm" in name.split(".")[-2]:
        is_offset = spec.offset_norms and not name.endswith("linear_attn.norm.weight")
        return np.full(shape, 0 if is_offset else ONE, dtype=np.uint16)
    num_values = math.prod(shape)
    variance = 4 if "embed" in name.split(".")[-2] else 1 / shape[-1] if len(shape) > 1 else 1
    raw = words.random_raw(-(-num_values // 4)).astype("<u8").view(np.uint16)[:num_values]
    scale = np.float32((3 * variance) ** 0.5 / 32768)
    values = (raw.astype(np.int32) - 32768).astype(np.float32) * scale
    return (values.view(np.uint32) >> np.uint32(16)).astype("<u2").reshape(shape)
