"""Poison: runs keep every bit under it, and code that reads what it must not shows at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from leafsum import _C
from leafsum.collectives.exchange import Exchange
from leafsum.collectives.testing import run_ranks
from leafsum.collectives.transport import SingleRank, Transport
from leafsum.ranks import ops, poison
from leafsum.ranks.blocks.experts import Experts
from leafsum.ranks.engine import Engine
from leafsum.ranks.linear import Linear
from leafsum.ranks.memory import MemorySizes
from leafsum.ranks.messages import Admit, Plan, StepResult
from leafsum.ranks.messages import Run as PlanRun
from leafsum.ranks.rows import StepRows
from model_runs import build, one_by_one, run_on_ranks, run_single, whole
from setups import make_setup
from tiny_checkpoints import write_checkpoint

PROMPTS = [
    torch.randint(101, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (37, 5)
]
ONE_SLOT = MemorySizes(num_slots=1, num_pages=4, page_size=16, dtype="bfloat16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def poisoned() -> Iterator[None]:
    poison.set_poison(True)
    yield
    poison.set_poison(False)


def hashes_of_one_rank(folder: Path) -> list[int]:
    return run_single(folder, PROMPTS, one_by_one(PROMPTS), "bfloat16").hashes


def hashes_of_two_ranks(folder: Path, exchange: str = "slots") -> list[int]:
    return run_on_ranks(folder, PROMPTS, whole(PROMPTS), "bfloat16", 2, exchange, "contiguous").hashes


@pytest.mark.parametrize("exchange", ["slots", "nodes"])
def test_poison_keeps_every_bit(folder, exchange):
    plain = hashes_of_one_rank(folder)
    poison.set_poison(True)
    try:
        assert hashes_of_one_rank(folder) == hashes_of_two_ranks(folder, exchange) == plain
    finally:
        poison.set_poison(False)


@pytest.mark.usefixtures("poisoned")
def test_fresh_memory_of_torch_and_of_the_kernels_is_nan():
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(torch.zeros(2, 2)).isnan().all()
    packed = ops.pack_weight(torch.ones(3, 4))
    assert packed[0, :, :3].eq(1).all()
    assert packed[0, :, 3:].isnan().all(), "columns past the last one"
    around = packed.as_strided((3, 4, 16), packed.stride(), storage_offset=0)
    assert around[0].isnan().all()
    assert around[2].isnan().all()


@pytest.mark.usefixtures("poisoned")
def test_an_unowned_expert_that_is_computed_and_sent_shows(folder, monkeypatch):
    """The break: every rank takes itself for the owner of expert 0, computes it and adds its own row of it."""
    load, gather = Experts.load, Exchange._gather_slots

    def load_with_expert_0(*arguments):
        block = load(*arguments)
        assert block.own is not None
        block.own.local_index[0] = 0
        return block

    def gather_but_keep_expert_0(self, rows, ids):
        whole_rows = gather(self, rows, ids)
        if self.placement.tree.ids_per_leaf > 1:  # the exchange of experts, not that of attention
            whole_rows[ids == 0] = rows[ids == 0]
        return whole_rows

    monkeypatch.setattr(Experts, "load", load_with_expert_0)
    assert hashes_of_two_ranks(folder) == hashes_of_one_rank(folder), "computed, but not sent: nothing to see"
    monkeypatch.setattr(Exchange, "_gather_slots", gather_but_keep_expert_0)
    residual_of_owner, residual_of_other = rank_residuals(folder)
    assert np.isfinite(residual_of_owner).all()
    assert np.isnan(residual_of_other).any()


@pytest.mark.usefixtures("poisoned")
def test_a_row_that_was_never_exchanged_shows(folder, monkeypatch):
    monkeypatch.setattr(Exchange, "_gather_slots", lambda _self, rows, _ids: rows)
    residual = rank_residuals(folder)
    assert np.isnan(residual).any(axis=-1).all()


def rank_residuals(folder: Path) -> np.ndarray:
    """Both ranks' residuals after one layer: a broken exchange lets them differ, and the next routers disagree."""

    def rank_run(transport: Transport) -> np.ndarray:
        model = build(folder, transport, "bfloat16", "slots")
        del model.layers[1:]  # type: ignore[attr-defined]
        model.allocate(ONE_SLOT)
        return model.forward(one_slot_rows(PROMPTS[0])).rows.numpy()

    return np.stack(run_ranks(2, rank_run))


def one_slot_rows(token_ids: list[int]) -> StepRows:
    num_rows = len(token_ids)
    return StepRows(
        token_ids=torch.tensor(token_ids),
        positions=torch.arange(num_rows, dtype=torch.int32),
        slots=torch.zeros(num_rows, dtype=torch.int32),
        page_table=torch.arange(4, dtype=torch.int32)[None],
        page_size=ONE_SLOT.page_size,
    )


@pytest.mark.usefixtures("poisoned")
def test_a_key_past_a_rows_own_position_shows(folder, monkeypatch):
    places = vars(StepRows)["places"]

    def one_key_too_many(self):
        found = places.func(self)
        return type(found)(found.pages, found.offsets, found.num_keys + (found.num_keys == len(PROMPTS[0])))

    monkeypatch.setattr(StepRows, "places", property(one_key_too_many))
    model = build(folder, SingleRank(), "bfloat16")
    model.allocate(ONE_SLOT)
    residual = model.forward(one_slot_rows(PROMPTS[0]))
    assert residual.first_bad_layer.tolist() == [-1] * (len(PROMPTS[0]) - 1) + [0]


def engine_of(folder: Path) -> Engine:
    setup = make_setup(folder, folder, tp=1, concurrency=2, kv_tokens=64, page_size=16, max_context=64, poison=True)
    return Engine(build(folder, SingleRank(), setup.dtype), SingleRank(), setup)


def serve(engine: Engine, step: int, page_ids: tuple[int, ...], releases: tuple[int, ...] = ()) -> StepResult:
    run = PlanRun(slot=0, start=0, token_ids=tuple(PROMPTS[1]), decides=True)
    return engine.execute(Plan(step=step, releases=releases, admits=(Admit(slot=0, page_ids=page_ids),), runs=(run,)))


@pytest.mark.usefixtures("poisoned")
def test_pages_are_nan_before_their_first_use_and_after_their_last(folder):
    engine = engine_of(folder)
    assert all(pages.isnan().all() for pages in engine.memory.paged())
    first = serve(engine, 1, (2,))
    written = [not pages[2].isnan().all() for pages in engine.memory.paged()]
    second = serve(engine, 2, (1,), releases=(0,))
    assert all(written)
    assert all(pages[2].isnan().all() for pages in engine.memory.paged())
    assert first.runs[0].residual_hash == second.runs[0].residual_hash


@pytest.mark.usefixtures("poisoned")
def test_a_stale_page_that_is_read_shows(folder, monkeypatch):
    """The break: a request's pages never reach the page table, so that it reads those of the one before."""
    engine = engine_of(folder)
    assert serve(engine, 1, (2,)).runs[0].bad_layer == -1
    stale_table, rows_of = engine.page_table.clone(), Engine._rows
    store = ops.store_kv

    def store_in_page_1(*arguments):
        store(*arguments[:4], torch.full_like(arguments[4], 1), arguments[5])

    monkeypatch.setattr(ops, "store_kv", store_in_page_1)
    monkeypatch.setattr(Engine, "_rows", lambda self, runs: _with_table(rows_of(self, runs), stale_table))
    assert serve(engine, 2, (1,), releases=(0,)).runs[0].bad_layer == 0


def _with_table(rows: StepRows, page_table: torch.Tensor) -> StepRows:
    return replace(rows, page_table=page_table)


@pytest.mark.usefixtures("poisoned")
def test_a_column_past_the_last_one_shows(folder, monkeypatch):
    """The break: the head says that its last block is whole."""
    call = Linear.__call__

    def all_columns(self, x):
        return call(Linear(self.packed, len(self.packed.bits) * 16, self.leaf_k, None), x)

    model = build(folder, SingleRank(), "bfloat16")
    assert model.spec.vocab_size % 16
    assert model.logits(torch.ones(1, model.spec.hidden_size)).isfinite().all()
    monkeypatch.setattr(Linear, "__call__", all_columns)
    assert model.logits(torch.ones(1, model.spec.hidden_size)).isnan().any()


@pytest.mark.usefixtures("poisoned")
def test_attention_leaves_of_other_ranks_are_nan_until_they_come(folder, monkeypatch):
    seen: list[bool] = []
    total = Exchange.sum

    def look(self, slot_rows, slot_ids, *rest):
        own = torch.from_numpy(self._owners[slot_ids.numpy()] == self.rank)
        seen.append(bool(slot_rows[~own].isnan().all() and slot_rows[own].isfinite().all()))
        return total(self, slot_rows, slot_ids, *rest)

    monkeypatch.setattr(Exchange, "sum", look)
    hashes_of_two_ranks(folder)
    assert len(seen) == 2 * 2 * 2, "ranks, layers, and the exchanges of attention and experts"
    assert all(seen)


def test_poison_is_off_unless_asked_for():
    assert not _C.poison()
    assert not poison.is_on()
    assert not torch.are_deterministic_algorithms_enabled()
