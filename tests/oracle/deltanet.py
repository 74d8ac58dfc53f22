"""Gated DeltaNet of docs/numerics.md section 6: every row from the state of its border and the rows since.

A segment is the rows from one border up to the next. Its rows are computed side by side, yet the chain of each takes
rows j ascending, as the page has it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oracle.fl32 import add, fma, mul, sub
from oracle.functions import exp, sigmoid, softplus
from oracle.norms import l2_norm
from oracle.rounding import round_to

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

SEGMENT_ROWS = 64


@dataclass(frozen=True, slots=True)
class Rows:
    """q, k [n, Hk, Dk] (rounded), v [n, Hv, Dv], beta and g [n, Hv]."""

    q: F32
    k: F32
    v: F32
    beta: F32
    g: F32

    def part(self, start: int, stop: int) -> Rows:
        names = ("q", "k", "v", "beta", "g")
        return Rows(*(getattr(self, name)[start:stop] for name in names))


@dataclass(frozen=True, slots=True)
class Results:
    """By position: outputs and updates u [T, Hv, Dv], keys [T, Hk, Dk], decays G [T, Hv]; states [borders, Hv, Dk, Dv],
    the one before row 0 first."""

    outputs: F32
    keys: F32
    updates: F32
    decays: F32
    states: F32


def deltanet(
    qkv: F32,
    b: F32,
    a: F32,
    a_log: F32,
    dt_bias: F32,
    key_index: I32,
    num_key_heads: int,
    key_dim: int,
    scale: float,
    dtype: str,
) -> Results:
    """Rows at positions 0.. of one sequence: qkv [T, 2 * Hk * Dk + Hv * Dv] after the convolution, b and a [T, Hv]."""
    rows = prepare(qkv, b, a, a_log, dt_bias, num_key_heads, key_dim, dtype)
    states = [np.zeros((len(key_index), key_dim, rows.v.shape[2]), dtype=np.float32)]
    outputs, updates, decays = (np.empty(like.shape, dtype=np.float32) for like in (rows.v, rows.v, rows.g))
    for start in range(0, len(qkv), SEGMENT_ROWS):
        segment = rows.part(start, start + SEGMENT_ROWS)
        stop = start + len(segment.g)
        decays[start:stop] = _running_sum(segment.g)
        outputs[start:stop], updates[start:stop] = _segment(segment, decays[start:stop], states[-1], key_index, scale)
        if len(segment.g) == SEGMENT_ROWS:
            states.append(_next_state(segment.k[:, key_index], decays[start:stop], updates[start:stop], states[-1]))
    return Results(outputs, rows.k, updates, decays, np.stack(states))


def prepare(qkv: F32, b: F32, a: F32, a_log: F32, dt_bias: F32, num_key_heads: int, key_dim: int, dtype: str) -> Rows:
    """What a row is before it meets others."""
    num_rows, num_keys = len(qkv), num_key_heads * key_dim
    q, k = (
        round_to(l2_norm(part.reshape(num_rows, num_key_heads, key_dim)), dtype)
        for part in (qkv[:, :num_keys], qkv[:, num_keys : 2 * num_keys])
    )
    v = qkv[:, 2 * num_keys :].reshape(num_rows, len(a_log), -1)
    return Rows(q, k, v, sigmoid(b), mul(-exp(a_log), softplus(add(a, dt_bias))))


def _running_sum(g: F32) -> F32:
    sums = g.copy()
    for i in range(1, len(g)):
        sums[i] = add(sums[i - 1], g[i])
    return sums


def _segment(rows: Rows, decays: F32, state: F32, key_index: I32, scale: float) -> tuple[F32, F32]:
    """The outputs and updates of the rows since one border."""
    num_rows, since_border = len(decays), exp(decays)[..., None]
    key_weights = _pair_weights(rows.k, rows.k, decays, key_index)
    query_weights = _pair_weights(rows.q, rows.k, decays, key_index)
    from_state = mul(since_border, _times_state(rows.k[:, key_index], state))
    corrections, sums, updates = (np.zeros_like(rows.v) for _ in range(3))
    for j in range(num_rows):
        known = add(from_state[j], corrections[j])
        updates[j] = mul(rows.beta[j, :, None], sub(rows.v[j], known))
        for total, weights, first in ((corrections, key_weights, j + 1), (sums, query_weights, j)):
            total[first:] = fma(weights[first:, j, :, None], updates[j], total[first:])
    from_state = mul(since_border, _times_state(rows.q[:, key_index], state))
    return mul(scale, add(from_state, sums)), updates


def _pair_weights(x: F32, k: F32, decays: F32, key_index: I32) -> F32:
    """[i, j, Hv] for j <= i: the dot product of x_i and k_j times d(i, j)."""
    dots = np.zeros((len(x), len(k), x.shape[1]), dtype=np.float32)
    for element in range(x.shape[2]):
        dots = fma(x[:, None, :, element], k[None, :, :, element], dots)
    weights = np.zeros((len(x), len(k), len(key_index)), dtype=np.float32)
    i, j = np.tril_indices(len(x))
    weights[i, j] = mul(dots[i, j][:, key_index], exp(sub(decays[i], decays[j])))
    return weights


def _times_state(x: F32, state: F32) -> F32:
    """x [n, Hv, Dk], state [Hv, Dk, Dv] -> [n, Hv, Dv]."""
    total = np.zeros((*x.shape[:2], state.shape[2]), dtype=np.float32)
    for element in range(x.shape[2]):
        total = fma(x[..., element, None], state[:, element], total)
    return total


def _next_state(k: F32, decays: F32, updates: F32, state: F32) -> F32:
    """The state of the next border, behind the last row of a whole segment."""
    total = mul(exp(decays[-1])[:, None, None], state)
    for key, decay, update in zip(k, decays, updates, strict=True):
        scaled_key = mul(exp(sub(decays[-1], decay))[:, None], key)
        total = fma(scaled_key[:, :, None], update[:, None, :], total)
    return total
