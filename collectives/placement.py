"""Placement: which rank owns which id, and what follows from it for the exchange (docs/numerics.md, section 4)."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from .tree import ROOT, CanonicalTree

NAMES = ("contiguous", "strided", "random", "random:SEED")
NAME_PATTERN = r"contiguous|strided|random(:[0-9]{1,18})?"
"""The texts that name a placement; a seed has at most 18 digits, and so fits every machine's integers."""

_ANYONE = -1  # a subtree of padding leaves alone
_SEVERAL = -2  # a subtree whose real leaves no single rank owns whole


def contiguous_share(num_parts: int, rank: int, num_ranks: int) -> range:
    """The contiguous rule: rank r has parts floor(r * n / ranks) .. floor((r + 1) * n / ranks) - 1; maybe none."""
    return range(rank * num_parts // num_ranks, (rank + 1) * num_parts // num_ranks)


@dataclass(frozen=True, slots=True)
class Placement:
    """owners[id] is the rank that owns id; the shared id, where the tree has one, comes last. Any map is legal."""

    tree: CanonicalTree
    num_ranks: int
    owners: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ValueError(f"expected at least 1 rank in a placement, found {self.num_ranks}")
        if len(self.owners) != self.tree.num_all_ids:
            raise ValueError(f"expected one owner for each of {self.tree.num_all_ids} ids, found {len(self.owners)}")
        strays = [owner for owner in self.owners if not 0 <= owner < self.num_ranks]
        if strays:
            raise ValueError(f"expected owners of 0..{self.num_ranks - 1}, found {strays[0]}")

    @classmethod
    def contiguous(cls, tree: CanonicalTree, num_ranks: int) -> Placement:
        """The contiguous rule over whole leaves; the default."""
        leaf_owners = [rank for rank in range(num_ranks) for _ in contiguous_share(tree.num_leaves, rank, num_ranks)]
        return cls(tree, num_ranks, tuple(leaf_owners[tree.leaf_of(id_)] for id_ in range(tree.num_all_ids)))

    @classmethod
    def strided(cls, tree: CanonicalTree, num_ranks: int) -> Placement:
        """Id i goes to rank i mod num_ranks; the shared id to the owner of the last id."""
        owners = [id_ % num_ranks for id_ in range(tree.num_ids)]
        return cls(tree, num_ranks, tuple(owners + owners[-1:] * tree.has_shared))

    @classmethod
    def random(cls, tree: CanonicalTree, num_ranks: int, seed: int) -> Placement:
        """A seeded shuffle of all ids dealt out evenly; the same on every machine (raw Philox words, stable sort)."""
        import numpy as np  # here, since settings read this module's names and must be quick to import

        words = np.random.Philox(key=seed).random_raw(tree.num_all_ids)
        owners = np.empty(tree.num_all_ids, dtype=np.int64)
        owners[np.argsort(words, kind="stable")] = np.arange(tree.num_all_ids) % num_ranks
        return cls(tree, num_ranks, tuple(owners.tolist()))

    @classmethod
    def named(cls, text: str, tree: CanonicalTree, num_ranks: int) -> Placement:
        """The placement that a setting names: contiguous, strided, random (seed 0) or random:SEED."""
        if re.fullmatch(NAME_PATTERN, text) is None:
            raise ValueError(f"expected a placement of {', '.join(NAMES)} (SEED of 1 to 18 digits), found {text!r}")
        name, _, seed = text.partition(":")
        if name == "random":
            return cls.random(tree, num_ranks, int(seed or 0))
        return cls.contiguous(tree, num_ranks) if name == "contiguous" else cls.strided(tree, num_ranks)

    def ids_of(self, rank: int) -> tuple[int, ...]:
        """The ids a rank owns, ascending; the shared id last."""
        return tuple(id_ for id_, owner in enumerate(self.owners) if owner == rank)

    @property
    def shared_leaves(self) -> tuple[int, ...]:
        """Leaves whose ids several ranks own, ascending; in `nodes` their rows travel one by one."""
        leaves = enumerate(self._leaf_owners())
        return tuple(leaf for leaf, owner in leaves if owner == _SEVERAL)

    def cover(self, rank: int) -> tuple[int, ...]:
        """The maximal subtrees all of whose real leaves this rank owns whole, as node numbers, ascending.

        Padding leaves belong to everyone, so they never keep a subtree from being whole. A function of the placement
        alone.
        """
        owners = self._node_owners()
        return tuple(
            node
            for node in range(ROOT, len(owners))
            if owners[node] == rank and (node == ROOT or owners[node // 2] != rank)
        )

    def max_chosen(self, rank: int, top_k: int, leaves: Collection[int] | None = None) -> int:
        """The most slots of one row that can fall to a rank: top_k of its ids, and the shared id where it owns it.

        `leaves` narrows the count to the ids of those leaves.
        """
        ids = [id_ for id_ in self.ids_of(rank) if leaves is None or self.tree.leaf_of(id_) in leaves]
        has_shared = self.tree.has_shared and self.tree.num_ids in ids
        return min(top_k, len(ids) - has_shared) + has_shared

    def rows_per_token(self, top_k: int) -> dict[str, int]:
        """Padded rows that each rank sends for one token, by exchange mode."""
        ranks, shared_leaves = range(self.num_ranks), self.shared_leaves
        return {
            "slots": max(self.max_chosen(rank, top_k) for rank in ranks),
            "nodes": max(len(self.cover(rank)) for rank in ranks)
            + max(self.max_chosen(rank, top_k, shared_leaves) for rank in ranks),
        }

    def auto_mode(self, top_k: int) -> str:
        """The exchange mode that `auto` takes: the one with fewer padded rows for a token, `nodes` for a tie."""
        rows = self.rows_per_token(top_k)
        return "nodes" if rows["nodes"] <= rows["slots"] else "slots"

    def _leaf_owners(self) -> list[int]:
        owners = [_ANYONE] * self.tree.num_padded_leaves
        for id_, owner in enumerate(self.owners):
            leaf = self.tree.leaf_of(id_)
            owners[leaf] = _whole_owner(owners[leaf], owner)
        return owners

    def _node_owners(self) -> list[int]:
        """By node number: the rank that owns all its real leaves whole, or _ANYONE or _SEVERAL; entry 0 is no node."""
        owners = [_ANYONE] * self.tree.num_padded_leaves + self._leaf_owners()
        for node in reversed(range(ROOT, self.tree.num_padded_leaves)):
            owners[node] = _whole_owner(owners[2 * node], owners[2 * node + 1])
        return owners


def _whole_owner(left: int, right: int) -> int:
    if left in (_ANYONE, right):
        return right
    return left if right == _ANYONE else _SEVERAL
