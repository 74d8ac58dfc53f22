"""The canonical tree: which leaf an id lies in, which leaves lie under a node (docs/numerics.md, sections 2 and 3)."""

from __future__ import annotations

from dataclasses import dataclass

ROOT = 1


@dataclass(frozen=True, slots=True)
class CanonicalTree:
    """The one order in which the rows of a sum are added.

    Leaf l holds the ids ids_per_leaf * l and up, added ascending from +0.0; the leaves, padded to a power of two, are
    added by a perfect binary tree. A shared id, `num_ids`, is added last in the last real leaf. Nodes are numbered as
    in a heap: the root is 1, the children of i are 2i and 2i + 1, leaf l is num_padded_leaves + l.
    """

    num_ids: int
    ids_per_leaf: int = 8
    has_shared: bool = False

    def __post_init__(self) -> None:
        for name, value in (("num_ids", self.num_ids), ("ids_per_leaf", self.ids_per_leaf)):
            if value < 1:
                raise ValueError(f"expected {name} of at least 1 in a canonical tree, found {value}")

    @property
    def num_leaves(self) -> int:
        """Leaves that hold an id."""
        return -(-self.num_ids // self.ids_per_leaf)

    @property
    def num_padded_leaves(self) -> int:
        """Leaves of the perfect tree: the next power of two; those past num_leaves are empty."""
        return 1 << (self.num_leaves - 1).bit_length()

    @property
    def num_all_ids(self) -> int:
        """Ids with the shared one: num_ids or num_ids + 1."""
        return self.num_ids + self.has_shared

    def leaf_of(self, id_: int) -> int:
        """The leaf that id_ (0 .. num_all_ids - 1) is added in."""
        if not 0 <= id_ < self.num_all_ids:
            raise ValueError(f"expected an id of 0..{self.num_all_ids - 1}, found {id_}")
        return min(id_, self.num_ids - 1) // self.ids_per_leaf

    def node_of_leaf(self, leaf: int) -> int:
        """The node number of a leaf, real or padding."""
        if not 0 <= leaf < self.num_padded_leaves:
            raise ValueError(f"expected a leaf of 0..{self.num_padded_leaves - 1}, found {leaf}")
        return self.num_padded_leaves + leaf

    def leaves_under(self, node: int) -> range:
        """The real leaves under a node (the leaf itself for a leaf's node); empty under padding."""
        if not ROOT <= node < 2 * self.num_padded_leaves:
            raise ValueError(f"expected a node of 1..{2 * self.num_padded_leaves - 1}, found {node}")
        first, width = node, 1
        while first < self.num_padded_leaves:
            first, width = 2 * first, 2 * width
        first -= self.num_padded_leaves
        return range(min(first, self.num_leaves), min(first + width, self.num_leaves))

    def ids_of_leaf(self, leaf: int) -> tuple[int, ...]:
        """The ids of a leaf in the order they are added; the shared id is last in the last leaf, padding has none."""
        first = self.ids_per_leaf * leaf
        ids = tuple(range(first, min(first + self.ids_per_leaf, self.num_ids)))
        is_last = leaf == self.num_leaves - 1
        return (*ids, self.num_ids) if self.has_shared and is_last else ids
