"""A rank process of a product that is broken on purpose: `BROKEN=NAME python -m broken_worker`, tests/ on PYTHONPATH.

A single rank is left whole: it is what the others are compared with.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
from leafsum.collectives.exchange import Exchange
from leafsum.ranks import ops, poison, start, worker
from leafsum.ranks.blocks.experts import Experts
from leafsum.ranks.messages import Plan, StepResult


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
        assert experts.own is not None
        experts.own.local_index[:] = torch.arange(len(experts.own.local_index))
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
    """The last row, or node, of the last rank never reaches its place: there is what an allocation holds."""
    gather = Exchange._gather

    def gather_all_but_one(self: Exchange, part: np.ndarray, counts: list[int]) -> list[np.ndarray]:
        *others, last = gather(self, part, counts)
        lost = torch.empty(last.shape).numpy()
        lost[:-1] = last[:-1]
        return [*others, lost]

    Exchange._gather = gather_all_but_one  # type: ignore[method-assign]


def nothing_as_asked() -> None:
    """Every bit is right, and was come to with slots over Gloo, one thread, no poison and no delay."""
    init, prepare_machine, set_poison = Exchange.__init__, start.prepare_machine, poison.set_poison
    meet_peers = start.meet_peers

    def init_with_slots(self: Exchange, placement: Any, rank: Any, transport: Any, _mode: str, *rest: Any) -> None:
        init(self, placement, rank, transport, "slots", *rest)

    Exchange.__init__ = init_with_slots  # type: ignore[method-assign, assignment]
    start.meet_peers = lambda setup: meet_peers(msgspec.structs.replace(setup, transport="gloo"))
    start.prepare_machine = lambda num_threads: prepare_machine(min(num_threads, 1))
    poison.set_poison = lambda is_on: set_poison(is_on and False)
    start.DelayedTransport = lambda transport, _seed: transport  # type: ignore[assignment, misc]


DEADLY = 249
"""A token id."""


def dies_of_a_token() -> None:
    """The last rank crashes in every step that has a row of DEADLY."""
    execute = start.Engine.execute

    def execute_or_crash(self: Any, plan: Plan) -> StepResult:
        if self.setup.rank == self.setup.num_ranks - 1 and any(DEADLY in run.token_ids for run in plan.runs):
            os.kill(os.getpid(), signal.SIGSEGV)
        return execute(self, plan)

    start.Engine.execute = execute_or_crash  # type: ignore[method-assign]


DEFECTS: dict[str, Callable[[], None]] = {
    "wrong tree": wrong_tree,
    "chain of partials": chain_of_partials,
    "unowned expert": unowned_expert,
    "stale page": stale_page,
    "dropped row": dropped_row,
    "nothing as asked": nothing_as_asked,
    "dies of a token": dies_of_a_token,
}

if __name__ == "__main__":
    if sys.argv[sys.argv.index("--tp") + 1] != "1":
        DEFECTS[os.environ["BROKEN"]]()
    worker.main()
