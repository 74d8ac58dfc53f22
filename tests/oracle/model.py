"""A whole qwen3_moe forward of one sequence, from the parts of this folder; weights are named as transformers does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from oracle.attention import attend
from oracle.experts import Expert, expert_row, slot_values
from oracle.fl32 import add, f32
from oracle.linear import narrow_linear, row_split_leaves, wide
from oracle.norms import rms_norm
from oracle.rotary import frequencies, rotary
from oracle.rounding import Storage, narrow, nearest_f32, round_to
from oracle.router import route
from oracle.tree import tree_sum

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
Weights = Mapping[str, F32]


@dataclass(frozen=True, slots=True)
class Config:
    """The numbers of a config.json that enter the arithmetic."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    norm_topk_prob: bool = True
    tie_word_embeddings: bool = False
    mlp_only_layers: tuple[int, ...] = ()
    decoder_sparse_step: int = 1

    def is_sparse(self, layer: int) -> bool:
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    @property
    def num_attention_leaves(self) -> int:
        """The largest power of two, at most 8, that divides the number of heads."""
        return next(leaves for leaves in (8, 4, 2, 1) if self.num_heads % leaves == 0)


@dataclass(frozen=True, slots=True)
class Forward:
    """residual [T, H] before the final norm, logits [T, V]."""

    residual: F32
    logits: F32


class Qwen3Moe:
    """weights: FP32 values as the checkpoint holds them; dtype: the compute dtype."""

    def __init__(self, config: Config, weights: Weights, dtype: str) -> None:
        self._config, self._weights, self._dtype = config, weights, dtype

    def forward(self, token_ids: Sequence[int]) -> Forward:
        """Rows at positions 0.. of one sequence; row t sees the keys of rows 0..t."""
        residual = f32(self._weights["model.embed_tokens.weight"])[list(token_ids)]
        for layer in range(self._config.num_layers):
            x = self._norm(f"model.layers.{layer}.input_layernorm", residual)
            residual = add(residual, self._attention(layer, x))
            x = self._norm(f"model.layers.{layer}.post_attention_layernorm", residual)
            residual = add(residual, self._mlp(layer, x))
        head = "model.embed_tokens.weight" if self._config.tie_word_embeddings else "lm_head.weight"
        return Forward(residual, self._wide(head, self._norm("model.norm", residual)))

    def _norm(self, name: str, x: F32) -> F32:
        return rms_norm(x, f32(self._weights[f"{name}.weight"]), self._config.rms_norm_eps)

    def _linear(self, name: str) -> Storage:
        return narrow(f32(self._weights[name]), self._dtype)

    def _bias(self, name: str) -> F32 | None:
        return f32(self._weights[name]) if name in self._weights else None

    def _attention(self, layer: int, x: F32) -> F32:
        config, prefix = self._config, f"model.layers.{layer}.self_attn"
        q = self._norm(f"{prefix}.q_norm", self._heads(f"{prefix}.q_proj", x, config.num_heads))
        k = self._norm(f"{prefix}.k_norm", self._heads(f"{prefix}.k_proj", x, config.num_kv_heads))
        v = self._heads(f"{prefix}.v_proj", x, config.num_kv_heads)
        outputs = self._attend(self._rotary(q), self._rotary(k), v)
        return self._output_projection(f"{prefix}.o_proj", outputs.reshape(len(x), -1))

    def _heads(self, name: str, x: F32, num_heads: int) -> F32:
        flat = self._wide(f"{name}.weight", x, self._bias(f"{name}.bias"))
        return flat.reshape(len(x), num_heads, self._config.head_dim)

    def _wide(self, name: str, x: F32, bias: F32 | None = None) -> F32:
        return wide(x, self._linear(name), self._dtype, bias)

    def _rotary(self, x: F32) -> F32:
        positions = np.arange(len(x), dtype=np.int32)
        return rotary(x, positions, frequencies(self._config.rope_theta, self._config.head_dim))

    def _attend(self, q: F32, k: F32, v: F32) -> F32:
        keys, values = round_to(k, self._dtype), round_to(v, self._dtype)
        scale, kv_index = float(inverse_sqrt(self._config.head_dim)), self._kv_index()
        outputs = np.empty_like(q)
        for row, head in np.ndindex(*q.shape[:2]):
            seen, group = slice(0, row + 1), kv_index[head]
            outputs[row, head] = attend(q[row, head], keys[seen, group], values[seen, group], scale, self._dtype)
        return outputs

    def _kv_index(self) -> I32:
        heads_per_group = self._config.num_heads // self._config.num_kv_heads
        return np.arange(self._config.num_heads, dtype=np.int32) // np.int32(heads_per_group)

    def _output_projection(self, name: str, x: F32) -> F32:
        num_leaves = self._config.num_attention_leaves
        leaves = row_split_leaves(x, self._linear(f"{name}.weight"), self._dtype, x.shape[1] // num_leaves)
        ids = np.tile(np.arange(num_leaves, dtype=np.int32), (len(x), 1))
        total, bias = tree_sum(leaves, ids, num_leaves, ids_per_leaf=1), self._bias(f"{name}.bias")
        return total if bias is None else add(total, bias)

    def _mlp(self, layer: int, x: F32) -> F32:
        config, prefix = self._config, f"model.layers.{layer}.mlp"
        if not config.is_sparse(layer):
            return expert_row(x, self._expert(prefix), self._dtype)
        logits = narrow_linear(x, self._linear(f"{prefix}.gate.weight"), self._dtype)
        ids, slot_weights = route(logits, config.top_k, config.norm_topk_prob)
        experts = [self._expert(f"{prefix}.experts.{i}") for i in range(config.num_experts)]
        slots = np.empty((*ids.shape, config.hidden_size), dtype=np.float32)
        slot_values(x, ids, slot_weights, experts, self._dtype, slots)
        return tree_sum(slots, ids, config.num_experts)

    def _expert(self, prefix: str) -> Expert:
        gate, up, down = (self._linear(f"{prefix}.{part}_proj.weight") for part in ("gate", "up", "down"))
        return Expert(gate, up, down)


def inverse_sqrt(number: int) -> np.float32:
    """number^-0.5, the exact value rounded once: 256 bits of an integer square root, never on a border by chance."""
    return nearest_f32(Fraction(1 << 256, isqrt(number << 512)))
