"""Which rank owns what: the rules of the named placements, the laws of covers, and the count of rows that travel."""

from __future__ import annotations

import pytest
from collectives.layouts import placements
from hypothesis import given, settings
from hypothesis import strategies as st
from leafsum.collectives.placement import Placement
from leafsum.collectives.tree import CanonicalTree
from leafsum.errors import ConfigError
from leafsum.runtime.settings import Settings


def owners_of_leaf(placement: Placement, leaf: int) -> set[int]:
    return {placement.owners[id_] for id_ in placement.tree.ids_of_leaf(leaf)}


@settings(deadline=None, derandomize=True)
@given(placements())
def test_covers_and_shared_leaves_hold_every_leaf_exactly_once(placement):
    tree = placement.tree
    covered = [
        leaf
        for rank in range(placement.num_ranks)
        for node in placement.cover(rank)
        for leaf in tree.leaves_under(node)
    ]
    assert sorted([*covered, *placement.shared_leaves]) == list(range(tree.num_leaves))


@settings(deadline=None, derandomize=True)
@given(placements())
def test_a_cover_node_is_owned_whole_and_its_parent_is_not(placement):
    tree = placement.tree
    for rank in range(placement.num_ranks):
        for node in placement.cover(rank):
            assert len(tree.leaves_under(node)) > 0
            assert all(owners_of_leaf(placement, leaf) == {rank} for leaf in tree.leaves_under(node))
            if node > 1:
                parent = tree.leaves_under(node // 2)
                assert any(owners_of_leaf(placement, leaf) != {rank} for leaf in parent)


@settings(deadline=None, derandomize=True)
@given(placements())
def test_a_shared_leaf_has_several_owners(placement):
    leaves = range(placement.tree.num_leaves)
    assert list(placement.shared_leaves) == [leaf for leaf in leaves if len(owners_of_leaf(placement, leaf)) > 1]


@settings(deadline=None, derandomize=True)
@given(placements())
def test_every_id_has_one_rank(placement):
    ids = [id_ for rank in range(placement.num_ranks) for id_ in placement.ids_of(rank)]
    assert sorted(ids) == list(range(placement.tree.num_all_ids))


@settings(deadline=None, derandomize=True)
@given(placements(), st.integers(1, 10))
def test_no_row_can_choose_more_of_a_rank_than_its_maximum(placement, top_k):
    tree = placement.tree
    for rank in range(placement.num_ranks):
        owned = placement.ids_of(rank)
        worst_row = [id_ for id_ in owned if id_ < tree.num_ids][:top_k]
        worst_row += [id_ for id_ in owned if id_ == tree.num_ids]
        assert placement.max_chosen(rank, top_k) == len(worst_row)
        in_last_leaf = [id_ for id_ in owned if tree.leaf_of(id_) == tree.num_leaves - 1]
        assert placement.max_chosen(rank, 999, {tree.num_leaves - 1}) == len(in_last_leaf)


@pytest.mark.parametrize("num_ranks", range(1, 10))
@pytest.mark.parametrize("num_ids", [1, 8, 20, 128, 512])
def test_contiguous_cuts_between_leaves_by_the_floor_rule(num_ids, num_ranks):
    tree = CanonicalTree(num_ids, 8, has_shared=True)
    placement = Placement.contiguous(tree, num_ranks)
    assert placement.shared_leaves == ()
    for rank in range(num_ranks):
        first, past = (r * tree.num_leaves // num_ranks for r in (rank, rank + 1))
        ids = [id_ for leaf in range(first, past) for id_ in tree.ids_of_leaf(leaf)]
        assert list(placement.ids_of(rank)) == ids


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_power_of_two_of_leaves_is_one_cover_row_a_rank(num_ranks):
    placement = Placement.contiguous(CanonicalTree(128), num_ranks)
    assert [placement.cover(rank) for rank in range(num_ranks)] == [(num_ranks + rank,) for rank in range(num_ranks)]
    assert placement.rows_per_token(8) == {"slots": 8, "nodes": 1}


def test_covers_of_three_ranks_and_of_padding():
    tree = CanonicalTree(40)  # five leaves of eight: leaves 5, 6 and 7 are padding and belong to everyone
    placement = Placement.contiguous(tree, 3)
    assert [placement.ids_of(rank)[0] for rank in range(3)] == [0, 8, 24]
    assert placement.cover(0) == (8,)
    assert placement.cover(1) == (9, 10)
    assert placement.cover(2) == (3, 11)


def test_ranks_without_ids_are_legal():
    placement = Placement.contiguous(CanonicalTree(4, ids_per_leaf=1), 8)
    assert [placement.ids_of(rank) for rank in range(8)] == [(), (0,), (), (1,), (), (2,), (), (3,)]
    assert placement.cover(0) == ()
    assert placement.max_chosen(0, 4) == 0


def test_strided_deals_ids_out_and_gives_the_shared_one_to_the_last_owner():
    placement = Placement.strided(CanonicalTree(8, 8, has_shared=True), 3)
    assert placement.owners == (0, 1, 2, 0, 1, 2, 0, 1, 1)
    assert placement.shared_leaves == (0,)
    assert placement.rows_per_token(2) == {"slots": 3, "nodes": 3}


def test_random_is_a_fixed_even_shuffle_of_its_seed():
    tree = CanonicalTree(12, 8, has_shared=True)
    assert Placement.random(tree, 3, 0).owners == RANDOM_OWNERS
    assert Placement.random(tree, 3, 1).owners != RANDOM_OWNERS
    sizes = [len(Placement.random(CanonicalTree(128), 5, 7).ids_of(rank)) for rank in range(5)]
    assert sizes == [26, 26, 26, 25, 25]


RANDOM_OWNERS = (0, 1, 1, 2, 1, 0, 2, 0, 2, 0, 1, 2, 0)


def test_placements_go_by_name():
    tree = CanonicalTree(64, 8, has_shared=True)
    assert Placement.named("contiguous", tree, 3) == Placement.contiguous(tree, 3)
    assert Placement.named("strided", tree, 3) == Placement.strided(tree, 3)
    assert Placement.named("random", tree, 3) == Placement.random(tree, 3, 0)
    assert Placement.named("random:17", tree, 3) == Placement.random(tree, 3, 17)


@pytest.mark.parametrize(
    "text", ["", "Random", "random:", "random:-1", "random:x", "random:²", f"random:{10**18}", "strided:1", "strided\n"]
)
def test_an_unknown_name_is_refused_with_the_choices_here_and_as_a_setting(text):
    with pytest.raises(ValueError, match=r"contiguous, strided, random, random:SEED .*found"):
        Placement.named(text, CanonicalTree(8), 2)
    with pytest.raises(ConfigError, match=r"contiguous, strided, random, random:SEED, found"):
        Settings(placement=text)


@pytest.mark.parametrize("text", ["contiguous", "strided", "random", "random:0", f"random:{10**18 - 1}"])
def test_a_setting_takes_the_names_that_are_placements(text):
    assert Placement.named(Settings(placement=text).placement, CanonicalTree(8), 2).num_ranks == 2


@pytest.mark.parametrize(
    ("num_ranks", "owners", "text"),
    [
        (2, (0, 1, 0), "one owner for each of 4 ids, found 3"),
        (2, (0, 1, 2, 0), r"owners of 0\.\.1, found 2"),
        (2, (0, -1, 1, 0), r"owners of 0\.\.1, found -1"),
        (0, (0, 0, 0, 0), "at least 1 rank.*found 0"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(num_ranks, owners, text):
    with pytest.raises(ValueError, match=text):
        Placement(CanonicalTree(4), num_ranks, owners)
