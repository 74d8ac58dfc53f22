"""How ranks choose a token: the best of every rank, or whole rows (digests), give the id that one rank would choose."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from leafsum.collectives.testing import run_ranks
from leafsum.collectives.transport import Transport
from leafsum.ranks.configs.load import load_spec
from leafsum.ranks.engine import Engine
from leafsum.ranks.memory import MemorySizes, ModelMemory
from leafsum.ranks.messages import Admit, Plan, Run, RunResult
from leafsum.ranks.models.causal import Residual, ResidualWatch
from leafsum.ranks.rows import StepRows
from leafsum.ranks.spec import ModelSpec
from numpy.typing import NDArray
from oracle.head import argmax, nonfinite_rows
from setups import make_setup
from tiny_checkpoints import write_checkpoint

NUM_ROWS = 4
F32 = NDArray[np.float32]


@dataclass
class TableModel:
    """A model whose logits are given: row i of `table`, F32 [NUM_ROWS, V], for token i. It has no attention."""

    spec: ModelSpec
    table: torch.Tensor
    vocab_ranges: tuple[tuple[int, int], ...]
    rank: int
    num_exchanges: int = 0
    exchange_mode: str = "nodes"

    def allocate(self, sizes: MemorySizes) -> ModelMemory:  # noqa: ARG002
        return ModelMemory([])

    def forward(self, rows: StepRows) -> Residual:
        return ResidualWatch(rows.positions, with_hashes=False).final(self.table[rows.token_ids])

    def logits(self, residual_rows: torch.Tensor) -> torch.Tensor:
        first, stop = self.vocab_ranges[self.rank]
        return residual_rows[:, first:stop].contiguous()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only its config.json is read."""
    return write_checkpoint(tmp_path_factory.mktemp("model"), vocab_size=200, num_experts=80, num_hidden_layers=1)


def decide(folder: Path, table: F32, num_ranks: int, digests: bool) -> tuple[RunResult, ...]:
    """One step that decides every row of the table, on all ranks, which must agree."""
    spec = load_spec(folder)

    def on_rank(transport: Transport) -> tuple[RunResult, ...]:
        limits = {"kv_tokens": 16, "page_size": 4, "concurrency": NUM_ROWS}
        setup = make_setup(folder, folder, transport.rank, tp=num_ranks, digests=digests, **limits)
        model = TableModel(spec, torch.from_numpy(table), vocab_ranges(table.shape[1], num_ranks), transport.rank)
        admits = tuple(Admit(slot=slot, page_ids=(slot,)) for slot in range(NUM_ROWS))
        runs = tuple(Run(slot=slot, start=0, token_ids=(slot,), decides=True) for slot in range(NUM_ROWS))
        plan = Plan(step=1, releases=(), admits=admits, runs=runs)
        return Engine(model, transport, setup).execute(plan).runs

    ranks = run_ranks(num_ranks, on_rank)
    assert all(each == ranks[0] for each in ranks)
    return ranks[0]


def vocab_ranges(vocab_size: int, num_ranks: int) -> tuple[tuple[int, int], ...]:
    """docs/numerics.md section 7, written again: 64 leaves of ids, and each rank's share of the leaves."""
    borders = [rank * 64 // num_ranks * vocab_size // 64 for rank in range(num_ranks + 1)]
    return tuple(itertools.pairwise(borders))


def assert_decided(folder: Path, table: F32, num_ranks: int) -> None:
    by_best, by_rows = (decide(folder, table, num_ranks, digests) for digests in (False, True))
    finite = (~nonfinite_rows(table)).tolist()
    ids = argmax(table)[1].tolist()
    for results in (by_best, by_rows):
        assert [result.bad_layer < 0 for result in results] == finite
        assert [result.token_id for result in results if result.bad_layer < 0] == [
            token_id for token_id, is_finite in zip(ids, finite, strict=True) if is_finite
        ]
    assert [result.token_id for result in by_best] == [result.token_id for result in by_rows]
    assert [result.logits_sha256 for result in by_rows] == [hashlib.sha256(row.tobytes()).hexdigest() for row in table]
    assert {result.logits_sha256 for result in by_best} == {""}


def table_of(values: list[float], vocab_size: int, seed: int) -> F32:
    return np.random.default_rng(seed).choice(np.array(values, dtype=np.float32), (NUM_ROWS, vocab_size))


FEW_VALUES = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan]


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    values=st.lists(st.sampled_from(FEW_VALUES), min_size=1, max_size=4),
    vocab_size=st.one_of(st.integers(1, 20), st.integers(1, 200)),
    num_ranks=st.sampled_from([1, 2, 3, 5, 8, 17]),
    seed=st.integers(0, 2**32 - 1),
)
@example(values=[0.0, -0.0], vocab_size=200, num_ranks=3, seed=0)  # all ids tie, also across the borders of ranks
@example(values=[-1.0, np.nan], vocab_size=64, num_ranks=8, seed=1)
@example(values=[-np.inf], vocab_size=3, num_ranks=5, seed=2)  # rank 0 has no ids, and -inf is the best there is
@example(values=[np.nan], vocab_size=3, num_ranks=5, seed=3)
def test_the_best_of_the_ranks_is_the_best_of_the_whole_row(folder, values, vocab_size, num_ranks, seed):
    assert_decided(folder, table_of(values, vocab_size, seed), num_ranks)


@pytest.mark.parametrize(("num_ranks", "vocab_size"), [(65, 3), (65, 64), (65, 200), (80, 40)])
def test_more_ranks_than_leaves_of_the_vocabulary(folder, num_ranks, vocab_size):
    """Some ranks have no ids, the first among them."""
    ranges = vocab_ranges(vocab_size, num_ranks)
    assert ranges[0][0] == ranges[0][1]
    assert_decided(folder, table_of([1.0, -1.0, 0.0], vocab_size, 5), num_ranks)
    assert_decided(folder, table_of([-3.4e38], vocab_size, 6), num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_the_last_id_before_a_border_and_the_first_after_it(folder, num_ranks):
    """Equal best values on both sides of each border: the lower id; a larger one after it: the higher id."""
    for first, _ in vocab_ranges(200, num_ranks)[1:]:
        table = np.full((NUM_ROWS, 200), -2.0, dtype=np.float32)
        table[0, [first - 1, first]] = 1.0
        table[1, [first - 1, first]] = [1.0, np.nextafter(np.float32(1), np.float32(2))]
        table[2, [first - 1, first]] = [-0.0, 0.0]
        table[3, [first - 1, first]] = [0.0, -0.0]
        found = [result.token_id for result in decide(folder, table, num_ranks, digests=False)]
        assert found == [first - 1, first, first - 1, first - 1]
