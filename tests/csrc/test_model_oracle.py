"""A whole small model: the kernels wired as the oracle wires its parts give the oracle's logits, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from bits import assert_same_bits
from leafsum import _C
from machines import machine
from oracle.golden import MODEL_CONFIG, MODEL_TOKENS, record, small_model_weights
from oracle.inputs import F32, integers, numbers
from oracle.linear import NARROW_LEAF_K
from oracle.model import Config, Qwen3Moe, inverse_sqrt
from oracle.rotary import frequencies
from oracle.rounding import DTYPES
from oracle.small_models import random_weights
from oracle.tree import tree_sum

PAGE_SIZE = 4
GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())


class KernelModel(Qwen3Moe):
    """The oracle's model with a kernel in place of every part."""

    def _norm(self, name: str, x: F32) -> F32:
        return _C.rms_norm(x, self._weights[f"{name}.weight"], self._config.rms_norm_eps, False)

    def _wide(self, name: str, x: F32, bias: F32 | None = None) -> F32:
        return self._product(name, x, 0, bias)

    def _product(self, name: str, x: F32, leaf_k: int, bias: F32 | None) -> F32:
        weight = self._weights[name]
        return _C.linear(x, self._packed(name), self._dtype, weight.shape[0], leaf_k, bias)

    def _packed(self, name: str) -> np.ndarray:
        return _C.pack_weight(_C.narrow(self._weights[name], self._dtype), self._dtype)

    def _rotary(self, x: F32) -> F32:
        positions = np.arange(len(x), dtype=np.int32)
        return _C.rotary(x, positions, frequencies(self._config.rope_theta, self._config.head_dim), 1.0)

    def _attend(self, q: F32, k: F32, v: F32) -> F32:
        num_rows, num_groups, head_dim = k.shape
        num_pages = -(-num_rows // PAGE_SIZE)
        positions = np.arange(num_rows, dtype=np.int32)
        keys = _C.narrow(np.full((num_pages, num_groups, head_dim, PAGE_SIZE), np.nan, dtype=np.float32), self._dtype)
        values = keys.reshape(num_pages, num_groups, PAGE_SIZE, head_dim).copy()
        _C.store_kv(k, v, keys, values, positions // PAGE_SIZE, positions % PAGE_SIZE, self._dtype)
        table, slots = np.arange(num_pages, dtype=np.int32)[None, :], np.zeros(num_rows, dtype=np.int32)
        scale = float(inverse_sqrt(head_dim))
        seen = positions + np.int32(1)
        return _C.attention(q, keys, values, table, slots, seen, self._kv_index(), scale, self._dtype)

    def _output_projection(self, name: str, x: F32) -> F32:
        num_leaves = self._config.num_attention_leaves
        leaf_k, num_columns = x.shape[1] // num_leaves, self._config.hidden_size
        packed = self._packed(f"{name}.weight")
        leaves = _C.linear_leaves(x, packed, self._dtype, num_columns, leaf_k)
        ids = np.tile(np.arange(num_leaves, dtype=np.int32), (len(x), 1))
        return root(leaves, ids, num_leaves, 1)

    def _mlp(self, layer: int, x: F32) -> F32:
        config, prefix = self._config, f"model.layers.{layer}.mlp"
        if not config.is_sparse(layer):
            hidden = _C.swiglu(self._wide(f"{prefix}.gate_proj.weight", x), self._wide(f"{prefix}.up_proj.weight", x))
            return self._wide(f"{prefix}.down_proj.weight", hidden)
        logits = self._product(f"{prefix}.gate.weight", x, NARROW_LEAF_K, None)
        ids, slot_weights = _C.router(logits, config.top_k, config.norm_topk_prob)
        gate, up, down = (self._experts(prefix, part) for part in ("gate", "up", "down"))
        slots = np.empty((*ids.shape, config.hidden_size), dtype=np.float32)
        everyone = np.arange(config.num_experts, dtype=np.int32)
        _C.experts(x, ids, slot_weights, gate, up, down, everyone, self._dtype, slots)
        return root(slots, ids, config.num_experts, 8)

    def _experts(self, prefix: str, part: str) -> np.ndarray:
        names = [f"{prefix}.experts.{i}.{part}_proj.weight" for i in range(self._config.num_experts)]
        return np.stack([self._packed(name) for name in names])


def root(slot_rows: F32, slot_ids: np.ndarray, num_ids: int, ids_per_leaf: int) -> F32:
    none, no_rows = np.zeros(0, dtype=np.int32), np.zeros((len(slot_rows), 0, slot_rows.shape[2]), dtype=np.float32)
    wanted = np.array([1], dtype=np.int32)
    nodes = _C.tree_nodes(slot_rows, slot_ids, num_ids, ids_per_leaf, True, none, no_rows, wanted)
    return np.ascontiguousarray(nodes[:, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_golden_logits(dtype: str) -> None:
    for instruction_set in _C.instruction_sets():
        with machine(instruction_set, 2):
            forward = KernelModel(MODEL_CONFIG, small_model_weights(), dtype).forward(MODEL_TOKENS)
        assert record(forward.logits) == GOLDEN[f"model/{dtype}"], instruction_set


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_layers_tied_head_and_long_rows(dtype: str) -> None:
    config = Config(
        hidden_size=20,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        num_experts=9,
        top_k=3,
        norm_topk_prob=False,
        tie_word_embeddings=True,
        mlp_only_layers=(0,),
    )
    weights = random_weights(config, vocab_size=30, expert_size=12, seed="dense", dense_size=28)
    token_ids = integers("tokens", 0, 30, (66,)).tolist()
    expected = Qwen3Moe(config, weights, dtype).forward(token_ids)
    actual = KernelModel(config, weights, dtype).forward(token_ids)
    assert_same_bits(actual.residual, expected.residual)
    assert_same_bits(actual.logits, expected.logits)


def test_a_prefix_has_the_bits_of_the_whole() -> None:
    """The row law of the oracle itself: what follows a row is no part of it."""
    model = Qwen3Moe(MODEL_CONFIG, small_model_weights(), "bfloat16")
    whole, prefix = model.forward(MODEL_TOKENS), model.forward(MODEL_TOKENS[:4])
    assert_same_bits(prefix.logits, whole.logits[:4])


def test_the_oracle_tree_tells_orders_apart() -> None:
    rows, ids = numbers("rows", (1, 9, 40), "mixed"), np.arange(0, 72, 8, dtype=np.int32)[None, :]
    other = np.ascontiguousarray(rows[:, ::-1])
    assert (tree_sum(rows, ids, 72) != tree_sum(other, ids, 72)).any()
