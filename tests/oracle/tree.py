"""The canonical tree of docs/numerics.md section 3: leaves from +0.0 by ascending id, then a perfect binary tree."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from oracle.fl32 import add

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

NO_NODES: Mapping[int, F32] = {}


def num_padded_leaves(num_ids: int, ids_per_leaf: int = 8) -> int:
    """The smallest power of two that holds ceil(num_ids / ids_per_leaf) leaves."""
    num_leaves, padded = -(-num_ids // ids_per_leaf), 1
    while padded < num_leaves:
        padded *= 2
    return padded


def leaf_of(slot_id: int, num_ids: int, ids_per_leaf: int = 8) -> int:
    """The shared id, num_ids, lies in the leaf of the last routed id."""
    return min(slot_id, num_ids - 1) // ids_per_leaf


def node_value(
    node: int, rows: F32, ids: I32, num_ids: int, ids_per_leaf: int = 8, given: Mapping[int, F32] = NO_NODES
) -> F32:
    """One token: rows [S, H] of ids [S] (negative: no row) -> [H], the value of a heap node (root 1)."""
    if node in given:
        return given[node]
    first_leaf_node = num_padded_leaves(num_ids, ids_per_leaf)
    if node < first_leaf_node:
        left = node_value(2 * node, rows, ids, num_ids, ids_per_leaf, given)
        return add(left, node_value(2 * node + 1, rows, ids, num_ids, ids_per_leaf, given))
    total = np.zeros(rows.shape[1], dtype=np.float32)
    for slot in sorted(range(len(ids)), key=lambda slot: int(ids[slot])):
        if ids[slot] >= 0 and leaf_of(int(ids[slot]), num_ids, ids_per_leaf) == node - first_leaf_node:
            total = add(total, rows[slot])
    return total


def tree_sum(slot_rows: F32, slot_ids: I32, num_ids: int, ids_per_leaf: int = 8) -> F32:
    """slot_rows [M, S, H], slot_ids [M, S] -> [M, H], the root of each row."""
    roots = [node_value(1, rows, ids, num_ids, ids_per_leaf) for rows, ids in zip(slot_rows, slot_ids, strict=True)]
    return np.stack(roots) if roots else np.zeros((0, slot_rows.shape[2]), dtype=np.float32)
