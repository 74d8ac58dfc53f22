"""A rank process of a product that is broken on purpose: `BROKEN=NAME python -m broken_worker`, tests/ on PYTHONPATH.

A single rank is left whole: it is what the others are compared with.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from leafsum.collectives import exchange
from leafsum.collectives.exchange import Exchange
from leafsum.ranks import ops, poison, worker
from leafsum.ranks.blocks.experts import Experts


def chain(rows: np.ndarray) -> np.ndarray:
    total = np.zeros_like(rows[:, 0])
    for slot in range(rows.shape[1]):
        total += rows[:, slot]
    return total


def wrong_tree() -> None:
    """Slots are added one after the other, in the order of their ids."""
    Exchange._sum_slots = lambda self, rows, ids: chain(self._gather_slots(rows, ids))  # type: ignore[method-assign]


def chain_of_partials() -> None:
    """Each rank's rows are added first, then the ranks' sums: what an all-reduce does."""

    def sum_slots(self: Exchange, rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
        gathered = self._gather_slots(rows, ids)
        owners = self._owners[ids][:, :, None]
        partials = [chain(np.where(owners == r, gathered, 0)) for r in range(self.transport.num_ranks)]
        return chain(np.stack(partials, axis=1))

    Exchange._sum_slots = sum_slots  # type: ignore[method-assign]


def unowned_expert() -> None:
    """Every rank computes all experts, with weights or without, and takes its neighbour's for its own."""
    load = Experts.load.__func__  # type: ignore[attr-defined]

    def load_wrongly(cls: type[Experts], *arguments: Any) -> Experts:
        experts = load(cls, *arguments)
        experts.local_index[:] = torch.arange(len(experts.local_index))
        experts.exchange._owners[:-1] = np.roll(experts.exchange._owners[:-1], 1)
        assert poison.is_on(), "without poison there is no memory for them"
        return experts

    Experts.load = classmethod(load_wrongly)  # type: ignore[assignment, method-assign]


def stale_page() -> None:
    """Attention reads the last page, which belongs to nobody, instead of the request's own."""
    attention = ops.attention

    def attend_elsewhere(queries: Any, key_pages: Any, value_pages: Any, page_table: Any, *rest: Any) -> Any:
        return attention(queries, key_pages, value_pages, torch.full_like(page_table, LAST_PAGE), *rest)

    ops.attention = attend_elsewhere  # type: ignore[assignment]


LAST_PAGE = 7
"""Of kv_tokens 512 in pages of 64."""


def dropped_row() -> None:
    """The last row that came from another rank never reaches its slot."""
    scatter = exchange._scatter

    def scatter_all_but_one(rows: np.ndarray, owners: np.ndarray, parts: list[np.ndarray]) -> np.ndarray:
        *others, last = parts
        if not len(last):
            return scatter(rows, owners, parts)
        owners = owners.copy()
        owners[tuple(np.argwhere(owners == len(others))[-1])] = -1
        return scatter(rows, owners, [*others, last[:-1]])

    exchange._scatter = scatter_all_but_one


DEFECTS: dict[str, Callable[[], None]] = {
    "wrong tree": wrong_tree,
    "chain of partials": chain_of_partials,
    "unowned expert": unowned_expert,
    "stale page": stale_page,
    "dropped row": dropped_row,
}

if __name__ == "__main__":
    if sys.argv[sys.argv.index("--tp") + 1] != "1":
        DEFECTS[os.environ["BROKEN"]]()
    worker.main()
