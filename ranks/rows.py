"""The rows of one step: which token stands at which position of which slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
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
        positions = self.positions.numpy()
        pages, offsets = np.divmod(positions, np.int32(page_size))
        return RowPlaces(
            pages=torch.from_numpy(self.page_table.numpy()[self.slots.numpy(), pages]),
            offsets=torch.from_numpy(offsets),
            num_keys=torch.from_numpy(positions + np.int32(1)),
        )


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Where each row's key and value go, and how many keys it sees, itself included: I32 [M], equal in every layer."""

    pages: torch.Tensor
    offsets: torch.Tensor
    num_keys: torch.Tensor
