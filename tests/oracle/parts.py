"""The operations that a model is wired of. Weights come as FP32 values; the compute dtype is entered here.

Rows lie at positions 0.. of one sequence. A test that puts kernels in their place overrides these methods.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from oracle import hyper, indexer
from oracle.attention import attend, gated
from oracle.config import num_head_leaves
from oracle.convolution import causal_convolution
from oracle.deltanet import deltanet
from oracle.experts import Expert, slot_values, swiglu
from oracle.functions import sigmoid
from oracle.linear import narrow_linear, row_split_leaves, wide
from oracle.ngram import stream_values
from oracle.norms import gated_norm, rms_norm
from oracle.rotary import rotary
from oracle.rounding import inverse_sqrt, narrow, round_to
from oracle.router import route
from oracle.tree import tree_sum

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
Lists = list[list[int] | None]
"""The positions that each row sees; None: every position up to its own."""


class Parts:
    """One compute dtype."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def rms_norm(self, x: F32, weight: F32, eps: float, one_plus_weight: bool) -> F32:
        """x [..., N] with weight [N], or x [..., groups, N] with weight [groups, N]."""
        return rms_norm(x, weight, eps, one_plus_weight)

    def gated_norm(self, x: F32, gate: F32, weight: F32, eps: float, activation: str) -> F32:
        return gated_norm(x, gate, weight, eps, activation)

    def wide(self, x: F32, weight: F32, bias: F32 | None = None) -> F32:
        return wide(x, narrow(weight, self.dtype), self.dtype, bias)

    def narrow(self, x: F32, weight: F32) -> F32:
        return narrow_linear(x, narrow(weight, self.dtype), self.dtype)

    def row_split(self, x: F32, weight: F32, num_heads: int) -> F32:
        """x [T, heads * width] -> [T, N]: the leaves and the tree."""
        num_leaves = num_head_leaves(num_heads)
        leaves = row_split_leaves(x, narrow(weight, self.dtype), self.dtype, x.shape[1] // num_leaves)
        return tree_sum(leaves, leaf_ids(len(x), num_leaves), num_leaves, ids_per_leaf=1)

    def rotary(self, x: F32, frequency: F32) -> F32:
        """x [T, heads, D]."""
        return rotary(x, np.arange(len(x), dtype=np.int32), frequency)

    def attention(self, q: F32, k: F32, v: F32, lists: Lists) -> F32:
        """q [T, Hq, D], k and v [T, G, D] -> [T, Hq, D]."""
        keys, values = round_to(k, self.dtype), round_to(v, self.dtype)
        scale, kv_index = float(inverse_sqrt(q.shape[2])), shared_index(q.shape[1], k.shape[1])
        outputs = np.empty_like(q)
        for row, seen in enumerate(seen_keys(lists)):
            row_keys, row_values = (part[seen][:, kv_index].swapaxes(0, 1) for part in (keys, values))
            outputs[row] = attend(q[row], row_keys, row_values, scale, self.dtype)
        return outputs

    def gated(self, x: F32, gate: F32) -> F32:
        return gated(x, gate)

    def key_lists(
        self, queries: F32, raw_keys: F32, norm: F32, eps: float, frequency: F32, block_size: int, budget: int
    ) -> Lists:
        """queries [T, Hi, D], normed and rotated; raw_keys [T, D]; norm [D], stored as an offset from one."""
        keys = indexer.pooled_keys(raw_keys, norm, eps, True, frequency, 1.0, block_size, self.dtype)
        scale = float(inverse_sqrt(raw_keys.shape[1]))
        return [
            indexer.selected_keys(row, keys, position, block_size, budget, scale, self.dtype)
            for position, row in enumerate(queries)
        ]

    def convolution(self, x: F32, weight: F32, dilation: int) -> F32:
        """x [T, C], weight [C, taps]; silu included."""
        return causal_convolution(x, weight, dilation)

    def deltanet(self, qkv: F32, b: F32, a: F32, a_log: F32, dt_bias: F32, num_key_heads: int, key_dim: int) -> F32:
        """qkv [T, 2 * Hk * Dk + Hv * Dv], b and a [T, Hv] -> [T, Hv, Dv]."""
        key_index, scale = shared_index(len(a_log), num_key_heads), float(inverse_sqrt(key_dim))
        return deltanet(qkv, b, a, a_log, dt_bias, key_index, num_key_heads, key_dim, scale, self.dtype).outputs

    def swiglu(self, gate: F32, up: F32) -> F32:
        return swiglu(gate, up)

    def route(self, logits: F32, top_k: int, renormalise: bool) -> tuple[I32, F32]:
        return route(logits, top_k, renormalise)

    def sigmoid(self, x: F32) -> F32:
        return sigmoid(x)

    def experts(
        self, x: F32, ids: I32, slot_weights: F32, mlps: Sequence[tuple[F32, F32, F32]], num_routed: int
    ) -> F32:
        """mlps: gate, up and down of every id, a shared expert's last -> the root of the tree."""
        experts = [Expert(*(narrow(weight, self.dtype) for weight in mlp)) for mlp in mlps]
        slots = np.empty((*ids.shape, x.shape[1]), dtype=np.float32)
        slot_values(x, ids, slot_weights, experts, self.dtype, slots)
        return tree_sum(slots, ids, num_routed)

    def mixer_row(self, x: F32, num_streams: int) -> F32:
        return hyper.mixer_row(x, num_streams)

    def injection_weights(self, z: F32, num_streams: int) -> F32:
        return hyper.injection_weights(z, num_streams)

    def mixed_row(self, y: F32, normed: F32, num_streams: int) -> F32:
        return hyper.mixed_row(y, normed, num_streams)

    def written_streams(self, streams: F32, output: F32, weights: F32) -> F32:
        return hyper.written_streams(streams, output, weights)

    def stream_values(self, key_normed: F32, query_normed: F32, value: F32) -> F32:
        return stream_values(key_normed, query_normed, value, float(inverse_sqrt(value.shape[1])))


def seen_keys(lists: Lists) -> list[list[int]]:
    return [list(range(row + 1)) if keys is None else keys for row, keys in enumerate(lists)]


def leaf_ids(num_rows: int, num_leaves: int) -> I32:
    return np.tile(np.arange(num_leaves, dtype=np.int32), (num_rows, 1))


def shared_index(num_heads: int, num_shared: int) -> I32:
    """Which of num_shared key heads each head uses."""
    return np.arange(num_heads, dtype=np.int32) // np.int32(num_heads // num_shared)
