"""Runs a whole model in this process: prompts cut into steps as a test says, on any number of ranks (threads)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from bits import assert_same_bits
from leafsum.collectives.testing import run_ranks
from leafsum.collectives.transport import SingleRank, Transport
from leafsum.ranks import ops
from leafsum.ranks.checkpoint import Checkpoint
from leafsum.ranks.configs.load import load_spec
from leafsum.ranks.context import RankContext
from leafsum.ranks.memory import MemorySizes
from leafsum.ranks.models import CausalModel, build_model
from leafsum.ranks.rows import StepRows
from numpy.typing import NDArray

Row = tuple[int, int]
"""(index of the prompt, position): one row of a step."""


@dataclass(frozen=True)
class Run:
    """What every row of every prompt came to, in prompt order: residual [rows, H], logits [rows, V], one hash a row."""

    residual: NDArray[np.float32]
    logits: NDArray[np.float32]
    hashes: list[int]
    first_bad_layers: list[int]


def assert_same_run(found: Run, expected: Run) -> None:
    assert_same_bits(found.residual, expected.residual)
    assert_same_bits(found.logits, expected.logits)
    assert found.hashes == expected.hashes
    assert found.first_bad_layers == expected.first_bad_layers


def build(
    folder: Path,
    transport: Transport,
    dtype: str,
    exchange: str = "auto",
    placement: str = "contiguous",
    layer_digests: bool = False,
) -> CausalModel:
    context = RankContext(transport.rank, transport.num_ranks, dtype, exchange, placement, transport, layer_digests)
    return build_model(load_spec(folder), Checkpoint.open(folder), context)


def whole(prompts: Sequence[Sequence[int]]) -> list[list[Row]]:
    """One step with every row of every prompt."""
    return [[(prompt, position) for prompt, tokens in enumerate(prompts) for position in range(len(tokens))]]


def one_by_one(prompts: Sequence[Sequence[int]]) -> list[list[Row]]:
    """A step a row, one prompt after the other: what decoding alone does."""
    return [[row] for row in whole(prompts)[0]]


def run_steps(
    model: CausalModel, prompts: Sequence[Sequence[int]], steps: Sequence[Sequence[Row]], page_size: int = 16
) -> Run:
    """Pages start as NaN and lie in no order, prompts take slots from the last one down; logits are this rank's."""
    pages_per_slot = max(-(-len(tokens) // page_size) for tokens in prompts) + 1
    num_slots = len(prompts) + 1
    page_ids = torch.randperm(num_slots * pages_per_slot, generator=torch.Generator().manual_seed(page_size))
    page_table = page_ids.view(num_slots, pages_per_slot).to(torch.int32)
    sizes = MemorySizes(num_slots, page_ids.numel(), page_size, model_dtype(model))
    model.allocate(sizes).fill_nan()
    results: dict[Row, tuple[torch.Tensor, torch.Tensor, int, int]] = {}
    for step in steps:
        rows = StepRows(
            token_ids=torch.tensor([prompts[prompt][position] for prompt, position in step]),
            positions=torch.tensor([position for _, position in step], dtype=torch.int32),
            slots=torch.tensor([num_slots - 1 - prompt for prompt, _ in step], dtype=torch.int32),
            page_table=page_table,
            page_size=page_size,
        )
        residual = model.forward(rows)
        hashes = ops.residual_hash(residual.rows, rows.positions)
        parts = residual.rows, model.logits(residual.rows), hashes, residual.first_bad_layer.tolist()
        results |= dict(zip(step, zip(*parts, strict=True), strict=True))
    in_order = [results[row] for row in whole(prompts)[0]]
    return Run(
        residual=np.stack([each[0].numpy() for each in in_order]),
        logits=np.stack([each[1].numpy() for each in in_order]),
        hashes=[each[2] for each in in_order],
        first_bad_layers=[each[3] for each in in_order],
    )


def model_dtype(model: CausalModel) -> str:
    return model.head.vocab_rows.packed.dtype  # type: ignore[attr-defined]


def run_single(
    folder: Path, prompts: Sequence[Sequence[int]], steps: Sequence[Sequence[Row]], dtype: str, page_size: int = 16
) -> Run:
    return run_steps(build(folder, SingleRank(), dtype), prompts, steps, page_size)


def run_on_ranks(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    steps: Sequence[Sequence[Row]],
    dtype: str,
    num_ranks: int,
    exchange: str,
    placement: str,
) -> Run:
    """Rank 0's residual, which all ranks must share, and the logits of the whole vocabulary."""

    def rank_run(transport: Transport) -> Run:
        return run_steps(build(folder, transport, dtype, exchange, placement), prompts, steps)

    runs = run_ranks(num_ranks, rank_run)
    assert all(run.hashes == runs[0].hashes for run in runs), "ranks disagree about a residual"
    logits = np.concatenate([run.logits for run in runs], axis=1)
    return Run(runs[0].residual, logits, runs[0].hashes, runs[0].first_bad_layers)
