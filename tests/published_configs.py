"""config.json of published models, as far as it says what a model is, and sparse files of their tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from leafsum.ranks.configs.load import load_spec
from leafsum.ranks.sizes import TABLE, expected_tensors, layer_name

QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 262144,
    "rope_theta": 10000000,
    "partial_rotary_factor": 0.25,
    "eos_token_id": 151645,
}

QWEN3_5_MOE_TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "mrope_section": [11, 11, 10]},
    "eos_token_id": 248044,
}

FLASH_NEXT_TEXT: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "vocab_size": 248320,
    "hidden_size": 2560,
    "num_hidden_layers": 48,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 12,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "output_gate_type": "sigmoid",
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640,
    "norm_topk_prob": True,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
    "hc_count": 4,
    "hc_lowrank": 320,
    "ple_layer_ids": [2],
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "eos_token_id": 248044,
}
FLASH_NEXT: dict[str, Any] = {
    "model_type": "qwen4_exp",
    "text_config": FLASH_NEXT_TEXT,
    "vision_config": {"model_type": "qwen4_exp_vision"},
    "tie_word_embeddings": False,
}

BESIDE_TEXT = {"model.visual.patch_embed.proj.weight": (1152, 3, 2, 16, 16), "mtp.layers.0.fc.weight": (2560, 5120)}
"""Stands in for the tensors that no rank reads."""
NUM_TABLE_SHARDS = 512


def write_sparse(folder: Path, config: dict[str, Any], num_files: int) -> Path:
    """A model folder whose files are as long as the real ones and take no room on the disk: headers, then holes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = list(_shapes(folder))
    weight_map = {}
    for index in range(num_files):
        part = tensors[index * len(tensors) // num_files : (index + 1) * len(tensors) // num_files]
        file = folder / f"model-{index + 1:05}-of-{num_files:05}.safetensors"
        _write_hollow(file, part)
        weight_map |= {name: file.name for name, _ in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def _shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Published layouts: experts one by one, an n-gram table in shards."""
    spec = load_spec(folder)
    tables = {layer_name(spec, layer, f"{TABLE}.weight"): layer for layer in (spec.ngram.layers if spec.ngram else ())}
    for name, shape in expected_tensors(spec, {}).items():
        if name not in tables:
            yield name, shape
            continue
        for shard in range(NUM_TABLE_SHARDS):
            rows = (shard + 1) * shape[0] // NUM_TABLE_SHARDS - shard * shape[0] // NUM_TABLE_SHARDS
            yield layer_name(spec, tables[name], f"{TABLE}.shard_{shard}.weight"), (rows, shape[1])
    yield from BESIDE_TEXT.items()


def _write_hollow(file: Path, tensors: list[tuple[str, tuple[int, ...]]]) -> None:
    header, end = {}, 0
    for name, shape in tensors:
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
