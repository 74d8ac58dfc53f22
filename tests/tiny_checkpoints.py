"""Small random checkpoints with the published names of qwen3_moe, written by a test into its own folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Tensors = dict[str, torch.Tensor]

BASE_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_experts": 20,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "use_sliding_window": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def config_with(**changes: Any) -> dict[str, Any]:
    """The base config with some fields changed; a field set to ... is left out."""
    return {name: value for name, value in (BASE_CONFIG | changes).items() if value is not ...}


def write_checkpoint(
    folder: Path,
    *,
    seed: int = 0,
    dtype: str = "bfloat16",
    fused: bool = False,
    num_shards: int = 1,
    edit: Callable[[Tensors], None] | None = None,
    **changes: Any,
) -> Path:
    """A whole model folder without tokenizer. `edit` may change the FP32 tensors, experts one by one, before they are
    rounded to `dtype`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_with(**changes)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = random_tensors(config, seed)
    if edit:
        edit(tensors)
    if fused:
        tensors = with_fused_experts(tensors)
    save_tensors(folder, {name: tensor.to(TORCH_DTYPES[dtype]) for name, tensor in tensors.items()}, num_shards)
    return folder


def save_tensors(folder: Path, tensors: Tensors, num_shards: int = 1) -> None:
    """One model.safetensors, or shards dealt out round robin and their index."""
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    weight_map = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensor for i, (name, tensor) in enumerate(tensors.items()) if i % num_shards == shard}
        save_file(part, folder / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def with_fused_experts(tensors: Tensors) -> Tensors:
    """The other published layout: all experts of a layer in two tensors, gate rows before up rows."""
    experts = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." in name}
    fused = {name: tensor for name, tensor in tensors.items() if name not in experts}
    for prefix in {name.split("experts.")[0] + "experts." for name in experts}:
        num_experts = sum(name.startswith(prefix) for name in experts) // 3
        gate, up, down = (
            torch.stack([experts[f"{prefix}{expert}.{part}_proj.weight"] for expert in range(num_experts)])
            for part in ("gate", "up", "down")
        )
        fused |= {f"{prefix}gate_up_proj": torch.cat([gate, up], dim=1), f"{prefix}down_proj": down}
    return fused


def random_tensors(config: dict[str, Any], seed: int) -> Tensors:
    """FP32 tensors of every published name, scaled so that activations stay near one through the layers."""
    generator = torch.Generator().manual_seed(seed)

    def linear(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 1.5 / shape[-1] ** 0.5

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    hidden = config["hidden_size"]
    tensors = {
        "model.embed_tokens.weight": torch.randn((config["vocab_size"], hidden), generator=generator),
        "model.norm.weight": norm(hidden),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = linear(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        parts = _attention(config, linear, norm) | _mlp(config, layer, linear)
        parts |= {"input_layernorm.weight": norm(hidden), "post_attention_layernorm.weight": norm(hidden)}
        tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in parts.items()}
    return tensors


def _attention(
    config: dict[str, Any], linear: Callable[..., torch.Tensor], norm: Callable[[int], torch.Tensor]
) -> Tensors:
    hidden, head_dim = (
        config["hidden_size"],
        config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
    )
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }
    parts = {f"self_attn.{name}.weight": linear(*shape) for name, shape in shapes.items()}
    if config["attention_bias"]:
        parts |= {f"self_attn.{name}.bias": linear(shape[0]) for name, shape in shapes.items()}
    return parts | {"self_attn.q_norm.weight": norm(head_dim), "self_attn.k_norm.weight": norm(head_dim)}


def _mlp(config: dict[str, Any], layer: int, linear: Callable[..., torch.Tensor]) -> Tensors:
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    if layer in config["mlp_only_layers"] or (layer + 1) % config["decoder_sparse_step"]:
        return _gated("mlp.", config["intermediate_size"], hidden, linear)
    num_experts = config.get("num_experts") or config["num_local_experts"]
    parts = {"mlp.gate.weight": linear(num_experts, hidden)}
    for expert in range(num_experts):
        parts |= _gated(f"mlp.experts.{expert}.", width, hidden, linear)
    return parts


def _gated(prefix: str, width: int, hidden: int, linear: Callable[..., torch.Tensor]) -> Tensors:
    return {
        f"{prefix}gate_proj.weight": linear(width, hidden),
        f"{prefix}up_proj.weight": linear(width, hidden),
        f"{prefix}down_proj.weight": linear(hidden, width),
    }
