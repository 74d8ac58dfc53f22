"""tree_nodes is the oracle's tree: every node, with rows missing, nodes given, and the shared id in the last leaf."""

from __future__ import annotations

import numpy as np
import pytest
from bits import assert_same_bits
from leafsum import _C
from machines import machines
from oracle.inputs import F32, I32, KINDS, numbers, permutation
from oracle.tree import leaf_of, node_value, num_padded_leaves, tree_sum

HIDDEN = 19
NO_NODES = np.zeros(0, dtype=np.int32)


def no_rows(num_rows: int) -> F32:
    return np.zeros((num_rows, 0, HIDDEN), dtype=np.float32)


def chosen_ids(num_rows: int, num_ids: int, num_slots: int) -> I32:
    """Ascending ids of 0..num_ids, so the shared one too; num_slots of them in each row."""
    rows = [np.sort(permutation(f"ids{row}", num_ids + 1)[:num_slots]) for row in range(num_rows)]
    return np.stack(rows).astype(np.int32)


def all_nodes(num_ids: int, ids_per_leaf: int) -> I32:
    return np.arange(1, 2 * num_padded_leaves(num_ids, ids_per_leaf), dtype=np.int32)


def oracle_nodes(rows: F32, ids: I32, num_ids: int, ids_per_leaf: int, wanted: I32) -> F32:
    values = [
        [node_value(int(node), row, row_ids, num_ids, ids_per_leaf) for node in wanted]
        for row, row_ids in zip(rows, ids, strict=True)
    ]
    return np.array(values, dtype=np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ids_per_leaf", [1, 8])
@pytest.mark.parametrize("num_ids", [1, 2, 7, 8, 9, 17, 40, 64])
def test_every_node(kind: str, ids_per_leaf: int, num_ids: int) -> None:
    ids = chosen_ids(4, num_ids, min(num_ids + 1, 9))
    rows = numbers("rows", (*ids.shape, HIDDEN), kind)
    wanted = all_nodes(num_ids, ids_per_leaf)
    expected = oracle_nodes(rows, ids, num_ids, ids_per_leaf, wanted)
    for _ in machines():
        actual = _C.tree_nodes(rows, ids, num_ids, ids_per_leaf, True, NO_NODES, no_rows(4), wanted)
        assert_same_bits(actual, expected, any_nan=kind == "special")


@pytest.mark.parametrize("ids_per_leaf", [1, 8])
def test_every_id_chosen(ids_per_leaf: int) -> None:
    num_ids = 21
    ids = chosen_ids(2, num_ids, num_ids + 1)
    rows = numbers("rows", (*ids.shape, HIDDEN), "mixed")
    actual = _C.tree_nodes(rows, ids, num_ids, ids_per_leaf, True, NO_NODES, no_rows(2), np.array([1], dtype=np.int32))
    assert_same_bits(actual[:, 0], tree_sum(rows, ids, num_ids, ids_per_leaf))


def test_rows_of_negative_ids_are_never_read() -> None:
    ids = chosen_ids(6, 30, 8)
    rows = numbers("rows", (*ids.shape, HIDDEN), "mixed")
    ids[numbers("gone", ids.shape) < 0] = -1
    rows[ids < 0] = np.nan
    ids[5] = -1
    wanted = all_nodes(30, 8)
    expected = oracle_nodes(rows, ids, 30, 8, wanted)
    assert np.isfinite(expected).all()
    for _ in machines():
        assert_same_bits(_C.tree_nodes(rows, ids, 30, 8, True, NO_NODES, no_rows(6), wanted), expected)


@pytest.mark.parametrize("ids_per_leaf", [1, 8])
@pytest.mark.parametrize(
    "given", [(2,), (3,), (2, 3), (4, 7), (2, 6), (5, 12, 13), (8, 9, 10, 11, 12, 13, 14, 15), (1,)]
)
def test_given_nodes_stand_for_their_slots(ids_per_leaf: int, given: tuple[int, ...]) -> None:
    """A tree of eight leaves; slots under given nodes hold NaN, and what is given is the nodes' own value."""
    num_ids = 8 * ids_per_leaf
    ids = chosen_ids(3, num_ids, min(num_ids, 9))
    rows = numbers("rows", (*ids.shape, HIDDEN), "mixed")
    given_nodes = np.array(given, dtype=np.int32)
    given_rows = oracle_nodes(rows, ids, num_ids, ids_per_leaf, given_nodes)
    unread = rows.copy()
    unread[is_under(ids, num_ids, ids_per_leaf, given)] = np.nan
    wanted = np.array([1, *given], dtype=np.int32)
    expected = oracle_nodes(rows, ids, num_ids, ids_per_leaf, wanted)
    for _ in machines():
        actual = _C.tree_nodes(unread, ids, num_ids, ids_per_leaf, True, given_nodes, given_rows, wanted)
        assert_same_bits(actual, expected)


def is_under(ids: I32, num_ids: int, ids_per_leaf: int, nodes: tuple[int, ...]) -> np.ndarray:
    def one(slot_id: int) -> bool:
        node = num_padded_leaves(num_ids, ids_per_leaf) + leaf_of(slot_id, num_ids, ids_per_leaf)
        return any(node >> up in nodes for up in range(node.bit_length()))

    return np.array([[one(int(slot_id)) for slot_id in row] for row in ids])


def test_a_given_value_is_taken_as_it_is() -> None:
    given_rows = numbers("given", (2, 1, HIDDEN))
    nothing = np.zeros((2, 0, HIDDEN), dtype=np.float32), np.zeros((2, 0), dtype=np.int32)
    wanted = np.array([1, 2, 3], dtype=np.int32)
    actual = _C.tree_nodes(*nothing, 16, 8, True, np.array([2], dtype=np.int32), given_rows, wanted)
    assert_same_bits(actual[:, 0], given_rows[:, 0])
    assert_same_bits(actual[:, 1], given_rows[:, 0])
    assert_same_bits(actual[:, 2], np.zeros((2, HIDDEN), dtype=np.float32))


def test_sums_start_at_plus_zero() -> None:
    ids = np.array([[3, 20]], dtype=np.int32)
    rows = np.full((1, 2, HIDDEN), -0.0, dtype=np.float32)
    actual = _C.tree_nodes(rows, ids, 32, 8, True, NO_NODES, no_rows(1), all_nodes(32, 8))
    assert_same_bits(actual, np.zeros_like(actual))
