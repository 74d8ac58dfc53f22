"""The n-gram embedding of docs/numerics.md section 10, with Python integers where the page counts in 64 bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from oracle.fl32 import f32, mul, sqrt
from oracle.functions import sigmoid
from oracle.hash import splitmix64_finalizer
from oracle.lanes import lane_sum_of_products

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

SMALLEST = 1e-6
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_LAYER_STEP = 10007


def multipliers(ngram_size: int, layer_index: int, seed: int, vocab_size: int) -> list[int]:
    """c_0 .. c_(n-1); layer_index counts the layers that have an n-gram embedding."""
    half = max(1, (2**63 - 1) // vocab_size // 2)
    seeds = (seed + _LAYER_STEP * layer_index + _GOLDEN_GAMMA * (i + 1) for i in range(ngram_size))
    return [2 * (splitmix64_finalizer(z + _GOLDEN_GAMMA) % half) + 1 for z in seeds]


def table_sizes(num_heads: int, layer_index: int, base: int) -> list[int]:
    """The primes of one layer's heads."""
    primes: list[int] = []
    candidate = base
    while len(primes) < (layer_index + 1) * num_heads:
        if _is_prime(candidate):
            primes.append(candidate)
        candidate += 1
    return primes[layer_index * num_heads :]


def _is_prime(number: int) -> bool:
    if number < 2:
        return False
    divisor = 2
    while divisor * divisor <= number:
        if number % divisor == 0:
            return False
        divisor += 1
    return True


def row_tokens(token_ids: Sequence[int], position: int, ngram_size: int, end_id: int) -> list[int]:
    """t_0 .. t_(n-1) of the row at `position`; an end id before the row hides what lies before it."""
    tokens = [token_ids[position]]
    for shift in range(1, ngram_size):
        behind_end = shift > 1 and tokens[-1] == end_id
        tokens.append(end_id if position < shift or behind_end else token_ids[position - shift])
    return tokens


def table_rows(
    token_ids: Sequence[int],
    ngram_size: int,
    heads_per_ngram: int,
    layer_index: int,
    seed: int,
    vocab_size: int,
    base: int,
    end_id: int,
) -> I64:
    """[T, heads]: rows of the layer's tables, which follow each other."""
    num_heads = (ngram_size - 1) * heads_per_ngram
    factors, sizes = multipliers(ngram_size, layer_index, seed, vocab_size), table_sizes(num_heads, layer_index, base)
    rows = []
    for position in range(len(token_ids)):
        tokens = row_tokens(token_ids, position, ngram_size, end_id)
        hashes = [_hash(tokens[:size], factors) for size in range(2, ngram_size + 1) for _ in range(heads_per_ngram)]
        rows.append([sum(sizes[:head]) + number % sizes[head] for head, number in enumerate(hashes)])
    return np.array(rows, dtype=np.int64).reshape(len(rows), num_heads)


def _hash(tokens: Sequence[int], factors: Sequence[int]) -> int:
    """The xor of the products modulo 2^64, read as a signed number; Python's remainder of it is never negative."""
    mixed = 0
    for token, factor in zip(tokens, factors, strict=False):
        mixed ^= token * factor % 2**64
    return mixed - 2**64 if mixed >= 2**63 else mixed


def stream_values(key_normed: F32, query_normed: F32, value: F32, scale: float) -> F32:
    """key_normed, query_normed [M, S * H], value [M, H] -> v [M, S * H]."""
    num_rows, width = value.shape
    keys, queries = (x.reshape(num_rows, -1, width) for x in (key_normed, query_normed))
    x = mul(lane_sum_of_products(keys, queries), scale)
    root = np.copysign(sqrt(np.maximum(np.abs(x), f32(SMALLEST))), x)
    r = np.where(x == 0, np.float32(0), root)
    return mul(sigmoid(r)[..., None], value[:, None, :]).reshape(key_normed.shape)
