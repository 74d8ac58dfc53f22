"""Sums that are wrong on purpose: what a receipt must be able to tell from the canonical order.

    pick-order         a plain chain over a token's rows, the heaviest first: an engine that adds as the router picked
    rank-chain         every rank adds its own rows, then the ranks' partial sums are added: an all-reduce
    bfloat16-partials  the same, the partial sums rounded to bfloat16 before they travel
    dropped-row        of about every token's exchanged rows one is lost
    doubled-row        of about every token's exchanged rows one is added twice
    flipped-bit        on one rank, in one sum, one mantissa bit of one element is the other one

All but the last are wrong alike on every rank, so that only a comparison with another run can tell. The last makes the
ranks unequal, which ends a run.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from .control_names import (
    CONTROLS,
    DROPPED_ROW,
    FLIPPED_BIT,
    FLIPPED_SUM,
    OTHER_ORDERS,
    PARTIAL_SUMS,
    RANK_CHAIN,
    SPOILED_ROWS,
)
from .exchange import F32, I32, Exchange
from .placement import Placement
from .transport import Transport

_HIGHEST_MANTISSA_BIT = np.int32(1 << 22)  # the lowest could be lost where the sum is added to a larger residual
_GOLDEN_RATIO = 0.6180339887498949  # multiples of it, without their whole part, leave no part of [0, 1) out for long


class ControlExchange(Exchange):
    """An Exchange whose `sum` is wrong as `control`, one of CONTROLS, says.

    Where that is another order, all rows travel, as in mode "slots"; else what is wrong is so in the mode asked for.
    """

    def __init__(
        self, control: str, placement: Placement, rank: int, transport: Transport, mode: str, top_k: int
    ) -> None:
        if control not in CONTROLS:
            raise ValueError(f"expected a control of {', '.join(CONTROLS)}, found {control!r}")
        super().__init__(placement, rank, transport, "slots" if control in OTHER_ORDERS else mode, top_k)
        self.control = control
        self._num_tokens = 0

    def sum(
        self, slot_rows: torch.Tensor, slot_ids: torch.Tensor, slot_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        self._num_tokens = len(slot_rows)
        if self.control not in OTHER_ORDERS:
            total = super().sum(slot_rows, slot_ids)
            return self._flipped(total) if self.control == FLIPPED_BIT else total
        rows, ids = self._checked(slot_rows, slot_ids)
        self.num_exchanges += 1
        rows = np.where(ids[:, :, None] >= 0, self._gather_slots(rows, ids), np.float32(0))
        return torch.from_numpy(self._sum_in_another_order(rows, ids, slot_weights))

    def _sum_in_another_order(self, rows: F32, ids: I32, slot_weights: torch.Tensor | None) -> F32:
        if self.control in PARTIAL_SUMS:
            owners = self._owners[ids]
            partials = [_chain(np.where(owners[:, :, None] == r, rows, 0)) for r in range(self.transport.num_ranks)]
            return _chain(np.stack([self._as_sent(partial) for partial in partials], axis=1))
        if slot_weights is None:
            raise ValueError(f"control {self.control}: expected slot_weights, which are its order, found none")
        picks = np.argsort(-slot_weights.numpy(), axis=1, kind="stable")
        return _chain(np.take_along_axis(rows, picks[:, :, None], axis=1))

    def _as_sent(self, partial: F32) -> F32:
        if self.control == RANK_CHAIN:
            return partial
        rounded: F32 = torch.from_numpy(partial).to(torch.bfloat16).to(torch.float32).numpy()
        return rounded

    def _gather(self, part: F32, counts: list[int]) -> list[F32]:
        """What all ranks sent; of it a row a token lost or doubled, alike on every rank: the sender's own one too.

        Rows of a rank lie in the order of tokens, so one in so many is about one a token; other ones in every sum, so
        that every request meets it also where its prompt is one of many in a single step.
        """
        parts = super()._gather(part, counts)
        if self.control not in SPOILED_ROWS:
            return parts
        rows = np.concatenate(parts)
        worth_it = np.flatnonzero(rows.any(axis=1))  # a node without a chosen expert is zero, and stays so
        step = max(1, len(worth_it) // self._num_tokens)
        first = int(self.num_exchanges * _GOLDEN_RATIO % 1 * step)
        rows[worth_it[first::step]] *= np.float32(0 if self.control == DROPPED_ROW else 2)
        return np.split(rows, np.cumsum(counts)[:-1])

    def _flipped(self, total: torch.Tensor) -> torch.Tensor:
        if self.num_exchanges == FLIPPED_SUM and self.rank == self.transport.num_ranks - 1:
            bits: NDArray[np.int32] = total.numpy().view(np.int32)
            bits[-1, bits.shape[1] // 2] ^= _HIGHEST_MANTISSA_BIT
        return total


def _chain(rows: F32) -> F32:
    """[M, S, H] -> [M, H]: slot by slot from +0.0."""
    total: F32 = np.zeros((rows.shape[0], rows.shape[2]), dtype=np.float32)
    for slot in range(rows.shape[1]):
        total += rows[:, slot]
    return total
