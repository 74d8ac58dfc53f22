"""The slots of one rank's model, in the test's hand: any rows of any slot, at any position, as often as it likes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from leafsum.ranks.memory import MemorySizes
from leafsum.ranks.models import CausalModel
from leafsum.ranks.models.causal import Residual
from leafsum.ranks.rows import StepRows
from model_runs import model_dtype
from numpy.typing import NDArray

Piece = tuple[int, int, Sequence[int]]
"""Slot, first position, tokens."""


class Slots:
    """Memory starts as NaN; every slot has pages for `max_rows` positions, in no order."""

    def __init__(self, model: CausalModel, num_slots: int, max_rows: int, page_size: int = 16) -> None:
        self.model = model
        self.page_size = page_size
        pages_per_slot = -(-max_rows // page_size)
        page_ids = torch.randperm(num_slots * pages_per_slot, generator=torch.Generator().manual_seed(page_size))
        self.page_table = page_ids.view(num_slots, pages_per_slot).to(torch.int32)
        self.memory = model.allocate(MemorySizes(num_slots, page_ids.numel(), page_size, model_dtype(model)))
        self.memory.fill_nan()

    def step(self, *pieces: Piece) -> list[NDArray[np.float32]]:
        """One step; the residual rows of each piece, all finite: a NaN would equal any other."""
        rows = self.forward(*pieces).rows.numpy()
        assert np.isfinite(rows).all()
        return np.split(rows, np.cumsum([len(tokens) for _, _, tokens in pieces])[:-1])

    def forward(self, *pieces: Piece) -> Residual:
        """The pieces' rows one behind the other."""
        return self.model.forward(
            StepRows(
                token_ids=torch.tensor([token for _, _, tokens in pieces for token in tokens]),
                positions=torch.cat([self.positions(start, start + len(tokens)) for _, start, tokens in pieces]),
                slots=torch.tensor([slot for slot, _, tokens in pieces for _ in tokens], dtype=torch.int32),
                page_table=self.page_table,
                page_size=self.page_size,
            )
        )

    @staticmethod
    def positions(start: int, end: int) -> torch.Tensor:
        return torch.arange(start, end, dtype=torch.int32)
