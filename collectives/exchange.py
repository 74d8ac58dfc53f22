"""The exchange: rows that lie on several ranks become the root of the canonical tree on every rank.

    slot rows ──► slots: the rows of all chosen slots ─────────────┐
              └─► nodes: values of the rank's cover (local tree),  ├─► all-gather ──► rest of the tree, on every rank
                         and the rows of leaves that ranks share ──┘

Both modes give the same bits (docs/numerics.md, section 4): what travels is what the receiver would have computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .._C import tree_nodes
from .hazards import HazardCounts
from .placement import Placement
from .transport import Transport
from .tree import ROOT

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

MODES = ("slots", "nodes", "auto")

_NO_OWNER = -1
_ROOT_NODE = np.array([ROOT], dtype=np.int32)
_NO_NODES = np.empty(0, dtype=np.int32)


class Exchange:
    """Sums rows over all ranks, in one order.

    `mode` "auto" becomes the placement's `auto_mode`. `top_k` is the number of routed slots in a row; a shared id is
    one more. `num_exchanges` counts the sums for which rows travelled; bytes are in `transport.stats`. `hazards`, where
    given, counts over the rows that this rank owns.
    """

    def __init__(
        self,
        placement: Placement,
        rank: int,
        transport: Transport,
        mode: str,
        top_k: int,
        hazards: HazardCounts | None = None,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"expected an exchange mode of {', '.join(MODES)}, found {mode!r}")
        if (rank, placement.num_ranks) != (transport.rank, transport.num_ranks):
            raise ValueError(
                f"expected the transport of rank {rank} of {placement.num_ranks}, as the placement says, "
                f"found one of rank {transport.rank} of {transport.num_ranks}"
            )
        self.placement = placement
        self.rank = rank
        self.transport = transport
        self.top_k = top_k
        self.mode = placement.auto_mode(top_k) if mode == "auto" else mode
        self.num_exchanges = 0
        self.hazards = hazards
        tree = placement.tree
        self._covers = [np.array(placement.cover(r), dtype=np.int32) for r in range(placement.num_ranks)]
        self._all_covers = np.concatenate(self._covers)
        self._owners = np.array([*placement.owners, _NO_OWNER], dtype=np.int32)  # index -1: no row in this slot
        shared_leaves = set(placement.shared_leaves)
        self._has_shared_leaves = bool(shared_leaves)
        in_shared_leaf = [tree.leaf_of(id_) in shared_leaves for id_ in range(tree.num_all_ids)]
        self._raw_owners = np.where([*in_shared_leaf, False], self._owners, _NO_OWNER)

    def rows_per_token(self) -> dict[str, int]:
        """Padded rows that each rank sends for one token: {"slots": n, "nodes": n}; the same on all ranks."""
        return self.placement.rows_per_token(self.top_k)

    def sum(
        self,
        slot_rows: torch.Tensor,
        slot_ids: torch.Tensor,
        slot_weights: torch.Tensor | None = None,  # noqa: ARG002 (for exchanges that add in another order)
    ) -> torch.Tensor:
        """slot_rows FP32 [M, S, H], slot_ids int32 [M, S] -> FP32 [M, H], the root of the tree, on every rank.

        slot_ids, the same on all ranks, ascend in a row; -1 says that the slot is empty. slot_rows hold values where
        this rank owns the id; other rows are never read. slot_weights FP32 [M, S], which the rows already hold, have no
        part in this order. Raises ValueError for a wrong shape, dtype or id, and what the transport raises.
        """
        rows, ids = self._checked(slot_rows, slot_ids)
        if self.hazards is not None:
            self.hazards.count_rows(rows[self._owners_of(ids) == self.rank])
        if self.transport.num_ranks == 1 or ids.size == 0:
            return torch.from_numpy(self._root(rows, ids))
        self.num_exchanges += 1
        with self.transport.stats.exchanging():
            return torch.from_numpy(self._sum_slots(rows, ids) if self.mode == "slots" else self._sum_nodes(rows, ids))

    def _sum_slots(self, rows: F32, ids: I32) -> F32:
        return self._root(self._gather_slots(rows, ids), ids)

    def _gather_slots(self, rows: F32, ids: I32) -> F32:
        owners = self._owners_of(ids)
        num_each = [int(np.count_nonzero(owners == r)) for r in range(self.transport.num_ranks)]
        parts = self._gather(rows[owners == self.rank], num_each)
        return _scatter(rows, owners, parts)

    def _sum_nodes(self, rows: F32, ids: I32) -> F32:
        num_rows, _, hidden = rows.shape
        own_part = self._tree_nodes(rows, ids, self._covers[self.rank]).reshape(-1, hidden)
        num_cover = counts = [num_rows * len(cover) for cover in self._covers]
        if self._has_shared_leaves:
            # One all-gather carries both kinds of rows: the cover, row by row, then the raw slots in (row, slot) order.
            raw_owners = self._raw_owners[ids]  # own_part has seen that they are in range
            own_part = np.concatenate([own_part, rows[raw_owners == self.rank]])
            counts = [num + int(np.count_nonzero(raw_owners == r)) for r, num in enumerate(num_cover)]
        parts = self._gather(own_part, counts)
        if self._has_shared_leaves:
            rows = _scatter(rows, raw_owners, [part[num:] for part, num in zip(parts, num_cover, strict=True)])
        given = [part[:num].reshape(num_rows, -1, hidden) for part, num in zip(parts, num_cover, strict=True)]
        return self._root(rows, ids, self._all_covers, np.concatenate(given, axis=1))

    def _gather(self, part: F32, counts: list[int]) -> list[F32]:
        return [gathered.numpy() for gathered in self.transport.all_gather_unequal(torch.from_numpy(part), counts)]

    def _root(self, rows: F32, ids: I32, given_nodes: I32 | None = None, given_rows: F32 | None = None) -> F32:
        return self._tree_nodes(rows, ids, _ROOT_NODE, given_nodes, given_rows)[:, 0]

    def _tree_nodes(
        self, rows: F32, ids: I32, wanted: I32, given_nodes: I32 | None = None, given_rows: F32 | None = None
    ) -> F32:
        if given_nodes is None or given_rows is None:
            given_nodes = _NO_NODES
            given_rows = np.empty((rows.shape[0], 0, rows.shape[2]), dtype=np.float32)
        tree = self.placement.tree
        return tree_nodes(rows, ids, tree.num_ids, tree.ids_per_leaf, tree.has_shared, given_nodes, given_rows, wanted)

    def _owners_of(self, ids: I32) -> I32:
        """The rank of each slot's id. Ids are checked here too: numpy counts negative ones from the end."""
        num_ids = self.placement.tree.num_all_ids
        if ids.size and int((ids + 1).view(np.uint32).max()) > num_ids:  # below -1 is far above, unsigned
            raise ValueError(f"slot_ids: expected values -1 to {num_ids - 1}, found {ids.min()} to {ids.max()}")
        owners: I32 = self._owners[ids]
        return owners

    def _checked(self, slot_rows: torch.Tensor, slot_ids: torch.Tensor) -> tuple[F32, I32]:
        rows, ids = np.ascontiguousarray(slot_rows.numpy()), np.ascontiguousarray(slot_ids.numpy())
        if rows.dtype != np.float32 or rows.ndim != 3:
            raise ValueError(f"expected slot_rows float32 [M, S, H], found {_describe(rows)}")
        if ids.dtype != np.int32 or ids.shape != rows.shape[:2]:
            raise ValueError(f"expected slot_ids int32 {list(rows.shape[:2])}, found {_describe(ids)}")
        return rows, ids


def _scatter(rows: F32, owners: I32, parts: list[F32]) -> F32:
    """Slot rows [M, S, H] with rank r's part, packed in (row, slot) order, at the slots where owners [M, S] is r.

    Slots without an owner hold nothing that may be read.
    """
    if not any(len(part) for part in parts):
        return rows
    scattered: F32 = torch.empty(rows.shape).numpy()  # torch's, since that can come poisoned
    for rank, part in enumerate(parts):
        scattered[owners == rank] = part
    return scattered


def _describe(array: NDArray[Any]) -> str:
    return f"{array.dtype} {list(array.shape)}"
