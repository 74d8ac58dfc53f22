"""Small random checkpoints of the families with DeltaNet, names as in transformers, written by a test into its folder.

Every tensor is random at a scale that keeps activations near one and lets every block matter; transformers itself
would start many at zero or one. Values come from exact operations only, so a folder is the same on every machine.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_checkpoints import TORCH_DTYPES, Tensors, save_tensors
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Qwen4ExpConfig,
    Qwen4ExpForCausalLM,
    Qwen4ExpForConditionalGeneration,
    Qwen4ExpTextConfig,
)


@dataclass(frozen=True)
class Family:
    """Classes of the plain text model and, if any, of the model that wraps it; fields that differ from BASE."""

    text_config: type[PreTrainedConfig]
    text_model: type[PreTrainedModel]
    fields: dict[str, Any]
    wrapped_config: type[PreTrainedConfig] | None = None
    wrapped_model: type[PreTrainedModel] | None = None


BASE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 40,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "bos_token_id": 0,
    "eos_token_id": 1,
}

FAMILIES = {
    "qwen3_next": Family(Qwen3NextConfig, Qwen3NextForCausalLM, {"intermediate_size": 32}),
    "qwen3_5_moe": Family(
        Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, {}, Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration
    ),
    "qwen4_exp": Family(
        Qwen4ExpTextConfig,
        Qwen4ExpForCausalLM,
        {
            "hc_count": 4,
            "hc_lowrank": 8,
            "ple_layer_ids": [2],
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 300,
            "make_ngram_vocab_size_divisible_by": 32,
            "split_ngram_parts": 4,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
            "output_gate_type": "sigmoid",
        },
        Qwen4ExpConfig,
        Qwen4ExpForConditionalGeneration,
    ),
}

VISION = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 2,
    "num_position_embeddings": 4,
    "patch_size": 2,
    "spatial_merge_size": 1,
    "temporal_patch_size": 1,
}


def write_family(
    folder: Path,
    family: str,
    seed: int = 0,
    dtype: str = "float32",
    *,
    wrapped: bool = False,
    terse: bool = False,
    fused: bool = False,
    whole_table: bool = False,
    vision_tensors: bool = True,
    num_shards: int = 1,
    edit: Callable[[Tensors], None] | None = None,
    **changes: Any,
) -> Path:
    """A whole model folder without tokenizer; `changes` are fields of the text config, a field set to ... is left out;
    `ngram_seed` is the field `seed`.

    `wrapped`: with a text_config and names below model.language_model. `terse`: config.json holds these fields alone,
    as published ones do, not every field of the class. `fused`: a layer's experts in two tensors. `whole_table`: an
    n-gram table in one tensor, not in split_ngram_parts. `edit` may change the FP32 tensors, by the names that
    transformers gives them in memory (experts fused, tables whole), before they are rounded to `dtype`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fields = config_fields(family, wrapped, changes)
    config = config_class(family, wrapped)(**fields)
    if terse:
        (folder / "config.json").write_text(json.dumps(fields))
    else:
        config.save_pretrained(folder)
    tensors = random_tensors(model_class(family, wrapped)(config), seed)
    if edit:
        edit(tensors)
    if not vision_tensors:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.visual.")}
    tensors = as_stored(tensors, config, fused, whole_table)
    save_tensors(folder, {name: _stored(tensor, dtype) for name, tensor in tensors.items()}, num_shards)
    return folder


def config_fields(family: str, wrapped: bool, changes: dict[str, Any]) -> dict[str, Any]:
    fields = {name: value for name, value in (BASE | FAMILIES[family].fields | changes).items() if value is not ...}
    if "ngram_seed" in fields:
        fields["seed"] = fields.pop("ngram_seed")
    fields["model_type"] = config_class(family, False).model_type
    if not wrapped:
        return fields
    return {
        "model_type": config_class(family, True).model_type,
        "text_config": fields,
        "vision_config": VISION | {"out_hidden_size": fields["hidden_size"]},
        "tie_word_embeddings": fields.get("tie_word_embeddings", False),
    }


def config_class(family: str, wrapped: bool) -> type[PreTrainedConfig]:
    config = FAMILIES[family].wrapped_config if wrapped else FAMILIES[family].text_config
    assert config is not None, f"{family} has no wrapped config"
    return config


def model_class(family: str, wrapped: bool) -> type[PreTrainedModel]:
    model = FAMILIES[family].wrapped_model if wrapped else FAMILIES[family].text_model
    assert model is not None, f"{family} has no wrapped model"
    return model


def random_tensors(model: PreTrainedModel, seed: int) -> Tensors:
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        tensors[name] = random_tensor(name, tensor, seed) if tensor.is_floating_point() else tensor.clone()
    return tensors


def random_tensor(name: str, like: torch.Tensor, seed: int) -> torch.Tensor:
    """FP32, uniform around a centre; its own generator, so that it depends on no other tensor of the model."""
    generator = np.random.default_rng([seed, zlib.crc32(name.replace("language_model.", "").encode())])
    unit = (generator.random(tuple(like.shape)) - 0.5) * 12**0.5
    centre, scale = _centre_and_scale(name, like)
    return torch.from_numpy((centre + scale * unit).astype(np.float32))


def _centre_and_scale(name: str, like: torch.Tensor) -> tuple[float, float]:
    """Mean and standard deviation of a tensor's elements."""
    kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if kind == "A_log":
        return -0.9, 2.1  # exp(-0.9 -+ 2.1 * sqrt(3)): 0.011 .. 15.4
    if kind == "dt_bias":
        return 0.0, 1.0
    if kind == "norm" and "linear_attn" in name:
        return 1.0, 0.3
    if "norm" in kind or kind == "bias":
        return 0.0, 0.3
    if kind in ("embed_tokens", "ngram_embedding"):
        return 0.0, 1.0
    if kind == "conv1d":
        return 0.0, 1.2 / like.shape[-1] ** 0.5
    if kind in ("input_mix_weight_up", "block_inject_weight"):
        return 0.0, 4.0 / like.shape[-1] ** 0.5
    return 0.0, 1.5 / like.shape[-1] ** 0.5


def as_stored(tensors: Tensors, config: PreTrainedConfig, fused: bool = False, whole_table: bool = False) -> Tensors:
    """By the names of a checkpoint, views of the given tensors, which have the names of a model in memory."""
    if not fused:
        tensors = with_single_experts(tensors)
    if not whole_table:
        tensors = with_table_shards(tensors, getattr(config.get_text_config(), "split_ngram_parts", 1))
    return tensors


def with_single_experts(tensors: Tensors) -> Tensors:
    """The published layout: three tensors an expert. A fused tensor has gate rows before up rows."""
    single: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(".experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            for expert, gate_and_up in enumerate(tensor):
                gate, up = gate_and_up.chunk(2)
                single |= {f"{prefix}{expert}.gate_proj.weight": gate, f"{prefix}{expert}.up_proj.weight": up}
        elif name.endswith(".experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            single |= {f"{prefix}{expert}.down_proj.weight": down for expert, down in enumerate(tensor)}
        else:
            single[name] = tensor
    return single


def with_table_shards(tensors: Tensors, num_parts: int) -> Tensors:
    """The published layout of an n-gram table: runs of its rows."""
    sharded: Tensors = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.ngram_embedding)\.weight", name)
        if not match:
            sharded[name] = tensor
            continue
        for part, rows in enumerate(tensor.chunk(num_parts)):
            sharded[f"{match[1]}.shard_{part}.weight"] = rows
    return sharded


def _stored(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    return tensor.to(TORCH_DTYPES[dtype]).contiguous() if tensor.is_floating_point() else tensor
