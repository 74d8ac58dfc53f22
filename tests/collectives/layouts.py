"""Placements and slots drawn by hypothesis: every shape of ownership that the exchange must be indifferent to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from leafsum.collectives.placement import Placement
from leafsum.collectives.tree import CanonicalTree
from numpy.typing import NDArray

MAX_RANKS = 9


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    num_ids = draw(st.one_of(st.integers(1, 40), st.integers(1, 512), st.sampled_from([8, 64, 128, 512])))
    tree = CanonicalTree(num_ids, draw(st.sampled_from([1, 8])), draw(st.booleans()))
    num_ranks = draw(st.integers(1, MAX_RANKS))
    kind = draw(st.sampled_from(["contiguous", "strided", "random", "uneven", "any"]))
    if kind in ("contiguous", "strided", "random"):
        text = f"random:{draw(st.integers(0, 99))}" if kind == "random" else kind
        placement = Placement.named(text, tree, num_ranks)
    elif kind == "uneven":
        borders = sorted(draw(st.lists(st.integers(0, num_ids), min_size=num_ranks - 1, max_size=num_ranks - 1)))
        owners = [sum(border <= id_ for border in borders) for id_ in range(tree.num_all_ids)]
        placement = Placement(tree, num_ranks, tuple(owners))
    else:
        seed = draw(st.integers(0, 2**32 - 1))
        owners = np.random.default_rng(seed).integers(0, num_ranks, tree.num_all_ids).tolist()
        placement = Placement(tree, num_ranks, tuple(owners))
    return _with_shared_anywhere(placement, draw(st.integers(-1, num_ranks - 1)))


def _with_shared_anywhere(placement: Placement, rank: int) -> Placement:
    """The shared id on `rank`; -1 leaves it where it is."""
    if not placement.tree.has_shared or rank < 0:
        return placement
    return Placement(placement.tree, placement.num_ranks, (*placement.owners[:-1], rank))


@dataclass(frozen=True, slots=True)
class Slots:
    """rows FP32 [M, S, H], ids int32 [M, S]; top_k is the routed part of S."""

    rows: NDArray[np.float32]
    ids: NDArray[np.int32]
    top_k: int


@st.composite
def slots(draw: st.DrawFn, tree: CanonicalTree) -> Slots:
    top_k = draw(st.integers(1, 10))
    num_rows = draw(st.integers(0, 5))
    hidden = draw(st.sampled_from([1, 3, 19]))
    return make_slots(tree, top_k, num_rows, hidden, draw(st.integers(0, 2**32 - 1)))


def make_slots(tree: CanonicalTree, top_k: int, num_rows: int, hidden: int, seed: int) -> Slots:
    """Up to top_k distinct ids a row, ascending, the shared id last; empty slots (-1) lie anywhere between them."""
    random = np.random.default_rng(seed)
    ids = np.full((num_rows, top_k + tree.has_shared), -1, dtype=np.int32)
    for row in range(num_rows):
        num_chosen = min(random.choice([top_k, random.integers(0, top_k + 1)]), tree.num_ids)
        chosen = np.sort(random.choice(tree.num_ids, num_chosen, replace=False)).tolist()
        if tree.has_shared and random.random() < 0.9:
            chosen.append(tree.num_ids)
        ids[row, np.sort(random.choice(ids.shape[1], len(chosen), replace=False))] = chosen
    return Slots(hard_values(random, (*ids.shape, hidden)), ids, top_k)


def hard_values(random: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Values whose sum depends on the order: 2^-60..2^60, signed zeros, subnormals, and pairs that cancel."""
    values = np.ldexp(random.standard_normal(shape), random.integers(-60, 61, shape)).astype(np.float32)
    near_one = random.standard_normal(shape).astype(np.float32)
    subnormal = random.integers(0, 2**23, shape, dtype=np.uint32).view(np.float32)
    kind = random.integers(0, 6, shape)
    values = np.select([kind < 2, kind == 2, kind == 3, kind == 4], [near_one, values, subnormal, -subnormal], -0.0)
    values = values.astype(np.float32)
    if shape[1] > 1:  # a later slot cancels an earlier one
        cancels = random.random((shape[0], shape[2])) < 0.3
        values[:, -1][cancels] = -values[:, 0][cancels]
    return values
