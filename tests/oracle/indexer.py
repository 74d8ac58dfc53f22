"""The indexer of docs/numerics.md section 5: pooled keys, scores of blocks, and the list of keys that a row sees."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oracle.fl32 import add, div, mul
from oracle.linear import chain
from oracle.norms import rms_norm
from oracle.rotary import rotary
from oracle.rounding import round_to

F32 = NDArray[np.float32]


def pooled_keys(
    raw: F32,
    weight: F32,
    eps: float,
    one_plus_weight: bool,
    frequency: F32,
    attention_factor: float,
    block_size: int,
    dtype: str,
) -> F32:
    """raw [T, D] at positions 0.. of one sequence -> [T // block_size, D] holding values of dtype."""
    num_blocks = len(raw) // block_size
    blocks = raw[: num_blocks * block_size].reshape(num_blocks, block_size, -1)
    total = blocks[:, 0]
    for i in range(1, block_size):
        total = add(total, blocks[:, i])
    normed = rms_norm(div(total, float(block_size)), weight, eps, one_plus_weight)
    first_positions = np.arange(num_blocks, dtype=np.int32) * np.int32(block_size)
    turned = rotary(normed[:, None], first_positions, frequency, attention_factor)[:, 0]
    return round_to(turned, dtype)


def block_scores(queries: F32, keys: F32, scale: float, dtype: str) -> F32:
    """queries [Hi, D] of one row, normed and rotated; keys [n, D] -> [n]."""
    dots = chain(round_to(queries, dtype), keys)
    positive = np.where((dots > 0) | np.isnan(dots), dots, np.float32(0))
    total = positive[0]
    for head in positive[1:]:
        total = add(total, head)
    return mul(total, scale)


def best_blocks(scores: F32, num_chosen: int) -> list[int]:
    """Ascending; of equal scores the lower block."""
    by_rank = sorted(range(len(scores)), key=lambda j: (-float(scores[j]), j))
    return sorted(by_rank[:num_chosen])


def selected_keys(
    queries: F32, keys: F32, position: int, block_size: int, budget: int, scale: float, dtype: str
) -> list[int] | None:
    """The positions that the row at `position` sees, ascending; None: every position up to its own. Empty where a score
    is NaN, so that nothing can be chosen.

    queries [Hi, D]; keys [n, D] of at least the blocks that are complete at `position`.
    """
    num_blocks, num_chosen = (position + 1) // block_size, budget // block_size
    if num_blocks <= num_chosen:
        return None
    scores = block_scores(queries, keys[:num_blocks], scale, dtype)
    if np.isnan(scores).any():
        return []
    chosen = best_blocks(scores, num_chosen)
    in_blocks = [block * block_size + i for block in chosen for i in range(block_size)]
    return in_blocks + list(range(num_blocks * block_size, position + 1))
