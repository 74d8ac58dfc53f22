"""The rows of one step: which token stands at which position of which slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StepRows:
    """M rows in any order; a slot's rows of one step are consecutive positions.

    token_ids I64 [M]; positions, slots I32 [M]; page_table I32 [num_slots, max_pages]: the KV page that holds positions
    page_size * j .. page_size * (j + 1) - 1 of a slot, for every layer.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    page_table: torch.Tensor

    def places(self, page_size: int) -> RowPlaces:
        pages = self.page_table[self.slots.long(), (self.positions // page_size).long()]
        return RowPlaces(pages=pages, offsets=self.positions % page_size, num_keys=self.positions + 1)


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Where each row's key and value go, and how many keys it sees, itself included: I32 [M], equal in every layer."""

    pages: torch.Tensor
    offsets: torch.Tensor
    num_keys: torch.Tensor
