"""Sums that are wrong on purpose: what a receipt must be able to tell from the canonical order.

    pick-order         a plain chain over a token's rows, the heaviest first: an engine that adds as the router picked
    rank-chain         every rank adds its own rows, then the ranks' partial sums are added: an all-reduce
    bfloat16-partials  the same, the partial sums rounded to bfloat16 before they travel
    dropped-row        one exchanged row of every sum is lost
    doubled-row        one exchanged row of every sum is added twice
    flipped-bit        on one rank, in one sum, one mantissa bit of one element is the other one

All but the last are wrong alike on every rank, so that only a comparison with another run can tell. The last makes the
ranks unequal, which ends a run.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from .exchange import F32, I32, Exchange
from .placement import Placement
from .transport import Transport

PICK_ORDER, RANK_CHAIN, BFLOAT16_PARTIALS = "pick-order", "rank-chain", "bfloat16-partials"
DROPPED_ROW, DOUBLED_ROW, FLIPPED_BIT = "dropped-row", "doubled-row", "flipped-bit"
CONTROLS = (PICK_ORDER, RANK_CHAIN, BFLOAT16_PARTIALS, DROPPED_ROW, DOUBLED_ROW, FLIPPED_BIT)
PARTIAL_SUMS = (RANK_CHAIN, BFLOAT16_PARTIALS)
"""Those that make sense for the leaves of attention too: they have ranks, but no picks."""

_FLIPPED_SUM = 2  # the second one of a run: layer 1, where there are two layers
_HIGHEST_MANTISSA_BIT = np.int32(1 << 22)  # the lowest could be lost where the sum is added to a larger residual


class ControlExchange(Exchange):
    """An Exchange whose `sum` is wrong as `control`, one of CONTROLS, says. All rows travel, as in mode "slots"."""

    def __init__(self, control: str, placement: Placement, rank: int, transport: Transport, top_k: int) -> None:
        if control not in CONTROLS:
            raise ValueError(f"expected a control of {', '.join(CONTROLS)}, found {control!r}")
        super().__init__(placement, rank, transport, "slots", top_k)
        self.control = control

    def sum(
        self, slot_rows: torch.Tensor, slot_ids: torch.Tensor, slot_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.control == FLIPPED_BIT:
            return self._flipped(super().sum(slot_rows, slot_ids))
        rows, ids = self._checked(slot_rows, slot_ids)
        self.num_exchanges += 1
        rows = np.where(ids[:, :, None] >= 0, self._gather_slots(rows, ids), np.float32(0))
        return torch.from_numpy(self._wrong_sum(rows, ids, slot_weights))

    def _wrong_sum(self, rows: F32, ids: I32, slot_weights: torch.Tensor | None) -> F32:
        if self.control in PARTIAL_SUMS:
            owners = self._owners[ids]
            partials = [_chain(np.where(owners[:, :, None] == r, rows, 0)) for r in range(self.transport.num_ranks)]
            return _chain(np.stack([self._as_sent(partial) for partial in partials], axis=1))
        if self.control == PICK_ORDER and slot_weights is not None:
            picks = np.argsort(-slot_weights.numpy(), axis=1, kind="stable")
            return _chain(np.take_along_axis(rows, picks[:, :, None], axis=1))
        return self._root(self._spoiled(rows), ids)

    def _as_sent(self, partial: F32) -> F32:
        if self.control == RANK_CHAIN:
            return partial
        rounded: F32 = torch.from_numpy(partial).to(torch.bfloat16).to(torch.float32).numpy()
        return rounded

    def _spoiled(self, rows: F32) -> F32:
        """One row lost or doubled; another one in every sum, so that every request meets it."""
        num_rows, num_slots, _ = rows.shape
        row, slot = self.num_exchanges % num_rows, self.num_exchanges % num_slots
        rows[row, slot] *= np.float32(0 if self.control == DROPPED_ROW else 2)
        return rows

    def _flipped(self, total: torch.Tensor) -> torch.Tensor:
        if self.num_exchanges == _FLIPPED_SUM and self.rank == self.transport.num_ranks - 1:
            bits: NDArray[np.int32] = total.numpy().view(np.int32)
            bits[-1, bits.shape[1] // 2] ^= _HIGHEST_MANTISSA_BIT
        return total


def _chain(rows: F32) -> F32:
    """[M, S, H] -> [M, H]: slot by slot from +0.0."""
    total: F32 = np.zeros((rows.shape[0], rows.shape[2]), dtype=np.float32)
    for slot in range(rows.shape[1]):
        total += rows[:, slot]
    return total
