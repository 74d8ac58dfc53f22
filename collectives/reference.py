"""The sum in plain numpy, from its definition: what every mode, placement and rank count must equal, bit for bit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .tree import CanonicalTree


def reference_sum(
    slot_rows: NDArray[np.float32], slot_ids: NDArray[np.int32], tree: CanonicalTree
) -> NDArray[np.float32]:
    """slot_rows FP32 [M, S, H], all of them there, slot_ids int32 [M, S] (-1: empty slot) -> FP32 [M, H].

    Slow and simple (docs/numerics.md, section 3): slots in ascending id into leaves that start at +0.0, then level by
    level, padding and empty leaves included.
    """
    sums = np.empty((slot_rows.shape[0], slot_rows.shape[2]), dtype=np.float32)
    for row, (values, ids) in enumerate(zip(slot_rows, slot_ids, strict=True)):
        nodes = np.zeros((tree.num_padded_leaves, slot_rows.shape[2]), dtype=np.float32)
        for slot in np.argsort(ids, kind="stable"):
            if ids[slot] >= 0:
                nodes[tree.leaf_of(int(ids[slot]))] += values[slot]
        while len(nodes) > 1:
            nodes = nodes[0::2] + nodes[1::2]
        sums[row] = nodes[0]
    return sums
