"""Whole small models: kernels wired as the oracle wires its parts give the oracle's logits, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from bits import assert_same_bits
from csrc.one_sequence import convolution, deltanet, index_pages, select_keys
from leafsum import _C
from machines import machine
from oracle.config import Config
from oracle.golden import MODELS, SmallModel, record
from oracle.inputs import F32, I32, integers, numbers
from oracle.linear import NARROW_LEAF_K
from oracle.model import Model
from oracle.parts import Lists, Parts, leaf_ids, num_head_leaves, shared_index
from oracle.rounding import DTYPES, inverse_sqrt
from oracle.small_models import random_weights
from oracle.tree import tree_sum

PAGE_SIZE = 4
GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())


class KernelParts(Parts):
    """A kernel in place of every part."""

    def rms_norm(self, x: F32, weight: F32, eps: float, one_plus_weight: bool) -> F32:
        return _C.rms_norm(x, weight, eps, one_plus_weight)

    def gated_norm(self, x: F32, gate: F32, weight: F32, eps: float, activation: str) -> F32:
        return _C.gated_norm(x, gate, weight, eps, activation)

    def wide(self, x: F32, weight: F32, bias: F32 | None = None) -> F32:
        return _C.linear(x, self._packed(weight), self.dtype, len(weight), 0, bias)

    def narrow(self, x: F32, weight: F32) -> F32:
        return _C.linear(x, self._packed(weight), self.dtype, len(weight), NARROW_LEAF_K, None)

    def _packed(self, weight: F32) -> np.ndarray:
        return _C.pack_weight(_C.narrow(weight, self.dtype), self.dtype)

    def row_split(self, x: F32, weight: F32, num_heads: int) -> F32:
        num_leaves = num_head_leaves(num_heads)
        leaf_k = x.shape[1] // num_leaves
        leaves = _C.linear_leaves(x, self._packed(weight), self.dtype, len(weight), leaf_k)
        return root(leaves, leaf_ids(len(x), num_leaves), num_leaves, 1)

    def rotary(self, x: F32, frequency: F32) -> F32:
        return _C.rotary(x, np.arange(len(x), dtype=np.int32), frequency, 1.0)

    def attention(self, q: F32, k: F32, v: F32, lists: Lists) -> F32:
        num_rows, num_groups, head_dim = k.shape
        num_pages = -(-num_rows // PAGE_SIZE)
        positions = np.arange(num_rows, dtype=np.int32)
        keys = _C.narrow(np.full((num_pages, num_groups, head_dim, PAGE_SIZE), np.nan, dtype=np.float32), self.dtype)
        values = keys.reshape(num_pages, num_groups, PAGE_SIZE, head_dim).copy()
        _C.store_kv(k, v, keys, values, positions // PAGE_SIZE, positions % PAGE_SIZE, self.dtype)
        table, slots = np.arange(num_pages, dtype=np.int32)[None, :], np.zeros(num_rows, dtype=np.int32)
        scale, seen = float(inverse_sqrt(head_dim)), positions + np.int32(1)
        counts = np.array([len(keys or []) for keys in lists], dtype=np.int32)
        selected = np.zeros((num_rows, max(counts)), dtype=np.int32)
        for row, listed in enumerate(lists):
            selected[row, : counts[row]] = listed or []
        kv_index = shared_index(q.shape[1], num_groups)
        return _C.attention(q, keys, values, table, slots, seen, kv_index, scale, self.dtype, selected, counts)

    def gated(self, x: F32, gate: F32) -> F32:
        return _C.sigmoid_times(x, gate)

    def key_lists(
        self, queries: F32, raw_keys: F32, norm: F32, eps: float, frequency: F32, block_size: int, budget: int
    ) -> Lists:
        pages = index_pages(raw_keys, norm, eps, True, frequency, 1.0, block_size, self.dtype)
        positions, scale = np.arange(len(queries), dtype=np.int32), float(inverse_sqrt(raw_keys.shape[1]))
        chosen = select_keys(queries, pages, positions, block_size, budget, scale, self.dtype)
        return [selected[:count].tolist() if count else None for selected, count in zip(*chosen, strict=True)]

    def convolution(self, x: F32, weight: F32, dilation: int) -> F32:
        return convolution(x, weight, dilation)

    def deltanet(self, qkv: F32, b: F32, a: F32, a_log: F32, dt_bias: F32, num_key_heads: int, key_dim: int) -> F32:
        key_index, scale = shared_index(len(a_log), num_key_heads), float(inverse_sqrt(key_dim))
        heads = key_index, num_key_heads, key_dim, scale
        return deltanet(qkv, b, a, a_log, dt_bias, *heads, self.dtype)

    def swiglu(self, gate: F32, up: F32) -> F32:
        return _C.swiglu(gate, up)

    def route(self, logits: F32, top_k: int, renormalise: bool) -> tuple[I32, F32]:
        return _C.router(logits, top_k, renormalise)

    def sigmoid(self, x: F32) -> F32:
        return _C.sigmoid(x)

    def experts(
        self, x: F32, ids: I32, slot_weights: F32, mlps: Sequence[tuple[F32, F32, F32]], num_routed: int
    ) -> F32:
        gate, up, down = (np.stack([self._packed(mlp[part]) for mlp in mlps]) for part in range(3))
        slots = np.empty((*ids.shape, x.shape[1]), dtype=np.float32)
        everyone = np.arange(len(mlps), dtype=np.int32)
        _C.experts(x, ids, slot_weights, gate, up, down, everyone, self.dtype, slots)
        return root(slots, ids, num_routed, 8)

    def mixer_row(self, x: F32, num_streams: int) -> F32:
        return _C.hyper_gates(x, num_streams, x.shape[1])[0]

    def injection_weights(self, z: F32, num_streams: int) -> F32:
        return _C.hyper_gates(z, num_streams, 0)[1]

    def mixed_row(self, y: F32, normed: F32, num_streams: int) -> F32:
        return _C.hyper_mix(y, normed, num_streams)

    def written_streams(self, streams: F32, output: F32, weights: F32) -> F32:
        return _C.hyper_write(streams, output, weights)

    def stream_values(self, key_normed: F32, query_normed: F32, value: F32) -> F32:
        return _C.ngram_values(key_normed, query_normed, value, float(inverse_sqrt(value.shape[1])))


def root(slot_rows: F32, slot_ids: np.ndarray, num_ids: int, ids_per_leaf: int) -> F32:
    none, no_rows = np.zeros(0, dtype=np.int32), np.zeros((len(slot_rows), 0, slot_rows.shape[2]), dtype=np.float32)
    wanted = np.array([1], dtype=np.int32)
    nodes = _C.tree_nodes(slot_rows, slot_ids, num_ids, ids_per_leaf, True, none, no_rows, wanted)
    return np.ascontiguousarray(nodes[:, 0])


def forward_logits(model: SmallModel, parts: Parts) -> F32:
    return Model(model.config, model.weights(), parts).forward(model.token_ids).logits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_golden_logits(name: str, dtype: str) -> None:
    """Compute dtypes without committed bits are held against the plain instruction set."""
    found = {}
    for instruction_set in reversed(_C.instruction_sets()):
        with machine(instruction_set, 2):
            found[instruction_set] = record(forward_logits(MODELS[name], KernelParts(dtype)))
        expected = GOLDEN[f"model/{name}/{dtype}"] if dtype in MODELS[name].dtypes else found["plain"]
        assert found[instruction_set] == expected, instruction_set


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
    expected = Model(config, weights, Parts(dtype)).forward(token_ids)
    actual = Model(config, weights, KernelParts(dtype)).forward(token_ids)
    assert_same_bits(actual.residual, expected.residual)
    assert_same_bits(actual.logits, expected.logits)


@pytest.mark.parametrize(("name", "num_tokens"), [("moe", 9), ("streams", 40)])
def test_a_prefix_has_the_bits_of_the_whole(name: str, num_tokens: int) -> None:
    """The row law of the oracle itself: what follows a row is no part of it."""
    small = MODELS[name]
    model = Model(small.config, small.weights(), Parts("bfloat16"))
    whole, prefix = (model.forward(small.token_ids[:num_rows]) for num_rows in (num_tokens, num_tokens - 5))
    assert_same_bits(prefix.logits, whole.logits[:-5])


def test_the_oracle_tree_tells_orders_apart() -> None:
    rows, ids = numbers("rows", (1, 9, 40), "mixed"), np.arange(0, 72, 8, dtype=np.int32)[None, :]
    other = np.ascontiguousarray(rows[:, ::-1])
    assert (tree_sum(rows, ids, 72) != tree_sum(other, ids, 72)).any()
