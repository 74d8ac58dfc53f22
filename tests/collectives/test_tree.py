"""The canonical tree against its definition, and its refusals."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leafsum.collectives.tree import CanonicalTree

trees = st.builds(CanonicalTree, st.integers(1, 512), st.sampled_from([1, 8]), st.booleans())


@settings(deadline=None, derandomize=True)
@given(trees)
def test_every_id_is_in_exactly_one_leaf_in_ascending_order(tree):
    ids = [id_ for leaf in range(tree.num_leaves) for id_ in tree.ids_of_leaf(leaf)]
    assert ids == list(range(tree.num_all_ids))
    for leaf in range(tree.num_leaves):
        assert {tree.leaf_of(id_) for id_ in tree.ids_of_leaf(leaf)} == {leaf}


@settings(deadline=None, derandomize=True)
@given(trees)
def test_a_node_has_the_leaves_of_its_two_children(tree):
    num_padded = tree.num_padded_leaves
    assert tree.leaves_under(1) == range(tree.num_leaves)
    for node in range(1, num_padded):
        assert [*tree.leaves_under(2 * node), *tree.leaves_under(2 * node + 1)] == list(tree.leaves_under(node))
    for leaf in range(num_padded):
        expected = [leaf] if leaf < tree.num_leaves else []
        assert list(tree.leaves_under(tree.node_of_leaf(leaf))) == expected


def test_leaves_are_padded_to_a_power_of_two():
    assert [CanonicalTree(n).num_padded_leaves for n in (1, 8, 9, 17, 128, 129, 512)] == [1, 1, 2, 4, 16, 32, 64]


def test_the_shared_id_is_last_in_the_leaf_of_the_last_id():
    tree = CanonicalTree(20, 8, has_shared=True)
    assert tree.ids_of_leaf(2) == (16, 17, 18, 19, 20)
    assert CanonicalTree(16, 8, has_shared=True).ids_of_leaf(1) == (8, 9, 10, 11, 12, 13, 14, 15, 16)
    assert tree.ids_of_leaf(3) == ()


def test_attention_leaves_are_a_tree_of_one_id_a_leaf():
    tree = CanonicalTree(8, ids_per_leaf=1)
    assert [tree.node_of_leaf(leaf) for leaf in range(8)] == list(range(8, 16))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: CanonicalTree(0), "num_ids of at least 1.*found 0"),
        (lambda: CanonicalTree(4, 0), "ids_per_leaf of at least 1.*found 0"),
        (lambda: CanonicalTree(4).leaf_of(4), r"an id of 0\.\.3, found 4"),
        (lambda: CanonicalTree(4, 1).node_of_leaf(4), r"a leaf of 0\.\.3, found 4"),
        (lambda: CanonicalTree(4, 1).leaves_under(8), r"a node of 1\.\.7, found 8"),
    ],
)
def test_what_lies_outside_the_tree_is_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call()
