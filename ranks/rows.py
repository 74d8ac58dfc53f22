"""The rows of one step: which token stands at which position of which slot."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

I32 = NDArray[np.int32]


@dataclass(frozen=True)
class StepRows:
    """M rows in any order; a slot's rows of one step are consecutive positions, ascending.

    token_ids I64 [M]; positions, slots I32 [M]; page_table I32 [num_slots, max_pages]: the KV page that holds positions
    page_size * j .. page_size * (j + 1) - 1 of a slot, for every layer. What follows from them is made once a step.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    page_table: torch.Tensor
    page_size: int

    @functools.cached_property
    def places(self) -> RowPlaces:
        positions = self.positions.numpy()
        pages, offsets = np.divmod(positions, np.int32(self.page_size))
        return RowPlaces(
            pages=torch.from_numpy(self.page_table.numpy()[self.slots.numpy(), pages]),
            offsets=torch.from_numpy(offsets),
            num_keys=torch.from_numpy(positions + np.int32(1)),
        )

    @functools.cached_property
    def runs(self) -> RowRuns:
        slots, positions = self.slots.numpy(), self.positions.numpy()
        order = np.argsort(slots, kind="stable")
        grouped = slots[order]
        begins = np.flatnonzero(np.concatenate([[True], grouped[1:] != grouped[:-1]])) if len(slots) else order
        return RowRuns(
            row_order=order.astype(np.int32),
            run_slots=grouped[begins],
            run_starts=positions[order[begins]],
            run_ends=np.append(begins[1:], len(slots)).astype(np.int32)[: len(begins)],
        )


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Where each row's key and value go, and how many keys it sees, itself included: I32 [M], equal in every layer."""

    pages: torch.Tensor
    offsets: torch.Tensor
    num_keys: torch.Tensor


@dataclass(frozen=True)
class RowRuns:
    """The rows grouped by slot, for blocks with a state.

    Run r is row_order[run_ends[r - 1]:run_ends[r]], of slot run_slots[r], positions from run_starts[r] on.
    row_order I32 [M], the others I32 [R].
    """

    row_order: I32
    run_slots: I32
    run_starts: I32
    run_ends: I32

    @property
    def arguments(self) -> tuple[I32, I32, I32, I32]:
        """As kernels take them."""
        return self.row_order, self.run_slots, self.run_starts, self.run_ends

    @functools.cached_property
    def lengths(self) -> I32:
        """Rows of each run."""
        return np.diff(self.run_ends, prepend=np.int32(0))

    @functools.cached_property
    def places_in_runs(self) -> I32:
        """Of each row in row_order, how many rows of its run come before it."""
        begins = self.run_ends - self.lengths
        return np.arange(len(self.row_order), dtype=np.int32) - np.repeat(begins, self.lengths)

    def are_last(self, num_rows: int) -> NDArray[np.bool_]:
        """Of each row in row_order, whether it is one of the last num_rows of its run."""
        is_last: NDArray[np.bool_] = np.repeat(self.lengths, self.lengths) - self.places_in_runs <= num_rows
        return is_last
