"""Slots of every family are used again: nothing of a request is left for the next, of others in the step, or after NaN.

What one request leaves in a slot and its pages is never cleared, but where poison is on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bits import Array, assert_same_bits
from leafsum.collectives.testing import run_ranks
from leafsum.collectives.transport import SingleRank, Transport
from leafsum.ranks import poison
from leafsum.ranks.engine import Engine
from leafsum.ranks.memory import UNWRITTEN_TOKEN
from leafsum.ranks.messages import Admit, Plan, Run, RunResult
from leafsum.ranks.rows import StepRows
from leafsum.ranks.spec import ROWS_PER_BORDER
from model_runs import build
from property_models import END_ID, MODELS, PropertyModels, tokens_of, write_property_model
from setups import make_setup
from slot_runs import Slots
from tiny_checkpoints import Tensors

INFINITE_ID = 50
FIRST, SECOND = tokens_of("first", 140), tokens_of("second", 70)
SECOND[20] = END_ID
SPOILT = [token if token != INFINITE_ID else 51 for token in tokens_of("spoilt", 80)]
BAD_POSITION = 66
SPOILT[BAD_POSITION] = INFINITE_ID
HEALTHY = [token if token != INFINITE_ID else 51 for token in FIRST[:80]]

families = pytest.mark.parametrize("family", MODELS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> PropertyModels:
    return PropertyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture
def poisoned() -> Iterator[None]:
    poison.set_poison(True)
    yield
    poison.set_poison(False)


@families
def test_a_slot_serves_one_request_after_another(models: PropertyModels, family: str) -> None:
    """Long and short ones, in chunks; between them the slot and its pages stay as they are."""
    requests = [FIRST, SECOND, [END_ID], FIRST[:3], FIRST[1:], SECOND[:2]]
    slots = Slots(models.single(family, "bfloat16"), 2, 140)
    expected = []
    for tokens in requests:
        fresh = Slots(models.single(family, "bfloat16"), 2, 140)
        expected.append(np.concatenate(fresh.step((1, 0, tokens))))
    slots = Slots(models.single(family, "bfloat16"), 2, 140)
    for tokens, rows in zip(requests, expected, strict=True):
        for start in range(0, len(tokens), 50):
            (found,) = slots.step((1, start, tokens[start : start + 50]))
            assert_same_bits(found, rows[start : start + 50])


@families
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_row_that_is_not_finite_fails_alone(tmp_path: Path, family: str, num_ranks: int) -> None:
    """Rows before it and all rows of other slots stay, in its step and later; its slot then serves another request."""

    def infinite(tensors: Tensors) -> None:
        tensors["model.embed_tokens.weight"][INFINITE_ID].fill_(torch.inf)

    folder = write_property_model(tmp_path, family, edit=infinite)
    healed = [51 if token == INFINITE_ID else token for token in SPOILT]

    def on_rank(transport: Transport) -> tuple[Array, list[int]]:
        model = build(folder, transport, "bfloat16", placement="strided")
        alone, of_healed = Slots(model, 2, 140).step((0, 0, HEALTHY), (1, 0, healed))
        slots = Slots(model, 2, 140)
        first = slots.forward((1, 0, SPOILT[:70]), (0, 0, HEALTHY[:60]))
        later = slots.forward((0, 60, HEALTHY[60:70]), (1, 70, SPOILT[70:]))
        (end,) = slots.step((0, 70, HEALTHY[70:]))
        (next_request,) = slots.step((1, 0, HEALTHY))
        assert_same_bits(first.rows[:BAD_POSITION].numpy(), of_healed[:BAD_POSITION])
        assert_same_bits(np.concatenate([first.rows[70:], later.rows[:10], end]), alone)
        assert_same_bits(next_request, alone)
        return alone, [*first.first_bad_layer.tolist(), *later.first_bad_layer.tolist()]

    for alone, bad_layers in run_ranks(num_ranks, on_rank):
        assert np.isfinite(alone).all()
        assert bad_layers == [-1] * BAD_POSITION + [0] * 4 + [-1] * 70 + [0] * 10


@pytest.mark.parametrize("name", ["index_qk_proj", "k_layernorm", "q_layernorm"])
def test_a_row_that_cannot_choose_its_keys_fails(tmp_path: Path, name: str) -> None:
    """A NaN in the indexer touches no row that sees all its keys, and spoils every row that must choose."""

    def spoiled(tensors: Tensors) -> None:
        tensors[f"model.layers.2.self_attn.indexer.{name}.weight"].view(-1)[-1] = torch.nan

    model = build(write_property_model(tmp_path, "qwen4_exp", edit=spoiled), SingleRank(), "bfloat16")
    assert model.spec.indexer is not None
    num_dense = model.spec.indexer.budget + model.spec.indexer.block_size - 1
    found = Slots(model, 1, 140).forward((0, 0, HEALTHY))
    assert found.first_bad_layer.tolist() == [-1] * num_dense + [2] * (len(HEALTHY) - num_dense)


# The engine, and poison


def engine_of(models: PropertyModels, family: str, transport: Transport, *, is_poisoned: bool) -> Engine:
    """3 slots, 24 pages of 16 positions."""
    folder = models.folder(family)
    limits = {"tp": transport.num_ranks, "concurrency": 3, "kv_tokens": 384, "page_size": 16, "max_context": 160}
    setup = make_setup(folder, folder, transport.rank, **limits, poison=is_poisoned, digests=True)
    return Engine(build(folder, transport, setup.dtype), transport, setup)


def serve(
    engine: Engine, slot: int, pages: range, tokens: Sequence[int], releases: Sequence[int] = ()
) -> list[RunResult]:
    """Admits the request, its prompt in chunks of 50, then three tokens that are drawn."""
    runs = [
        Run(slot=slot, start=start, token_ids=tuple(tokens[start : start + 50]), decides=start + 50 >= len(tokens))
        for start in range(0, len(tokens), 50)
    ]
    runs += [Run(slot=slot, start=len(tokens) + drawn, token_ids=(), decides=True) for drawn in range(2)]
    results = []
    for index, run in enumerate(runs):
        admits = (Admit(slot=slot, page_ids=tuple(pages)),) if index == 0 else ()
        plan = Plan(step=engine.step + 1, releases=tuple(releases) if index == 0 else (), admits=admits, runs=(run,))
        results += engine.execute(plan).runs
    return results


@families
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_reopened_slot_knows_nothing_of_its_past(models: PropertyModels, family: str, num_ranks: int) -> None:
    """With poison and without: neither changes a bit."""

    def on_rank(transport: Transport, is_poisoned: bool) -> list[list[RunResult]]:
        engine = engine_of(models, family, transport, is_poisoned=is_poisoned)
        first = serve(engine, 1, range(9), FIRST)
        return [first, serve(engine, 1, range(3, 8), SECOND, releases=[1]), serve(engine, 0, range(10, 15), SECOND)]

    expected = None
    for is_poisoned in (False, True):
        poison.set_poison(is_poisoned)
        try:
            of_ranks = run_ranks(num_ranks, lambda transport, on=is_poisoned: on_rank(transport, on))
        finally:
            poison.set_poison(False)
        for _, second, elsewhere in of_ranks:
            assert without_slots(second) == without_slots(elsewhere)
            assert all(result.bad_layer < 0 for result in second)
            expected = expected or without_slots(second)
            assert without_slots(second) == expected


def without_slots(results: Sequence[RunResult]) -> list[tuple[int, int, str]]:
    return [(result.token_id, result.residual_hash, result.logits_sha256) for result in results]


@pytest.mark.usefixtures("poisoned")
@families
def test_what_is_released_is_nan(models: PropertyModels, family: str) -> None:
    engine = engine_of(models, family, SingleRank(), is_poisoned=True)
    serve(engine, 1, range(9), FIRST)
    serve(engine, 2, range(10, 15), SECOND)
    of_slots, paged = engine.memory.of_slots(), engine.memory.paged()
    assert not any(is_poison(tensor[1]) or is_poison(tensor[2]) for tensor in of_slots)
    assert not any(is_poison(tensor[page]) for tensor in paged for page in (*range(9), *range(10, 15)))
    others = [tensor[[0, 2]].clone() for tensor in of_slots] + [tensor[9:].clone() for tensor in paged]
    engine.execute(Plan(step=engine.step + 1, releases=(1,), admits=(), runs=()))
    assert all(is_poison(tensor[1]) for tensor in of_slots)
    assert all(is_poison(tensor[:9]) for tensor in paged)
    now = [tensor[[0, 2]] for tensor in of_slots] + [tensor[9:] for tensor in paged]
    for tensor, before in zip(now, others, strict=True):
        assert_same_bits(tensor.contiguous().view(torch.uint8).numpy(), before.view(torch.uint8).numpy())


def is_poison(tensor: torch.Tensor) -> bool:
    return bool((tensor.isnan() if tensor.is_floating_point() else tensor == UNWRITTEN_TOKEN).all())


@pytest.mark.usefixtures("poisoned")
@families
@pytest.mark.parametrize("too_far", [1, ROWS_PER_BORDER])
def test_a_row_or_a_state_that_is_read_too_far_on_shows(
    models: PropertyModels, family: str, too_far: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The break: blocks with a state take the first row of a request for a later one, and read what nobody wrote."""
    engine = engine_of(models, family, SingleRank(), is_poisoned=True)
    serve(engine, 1, range(9), FIRST)
    runs = StepRows.__dict__["runs"].func
    later = lambda self: replace(runs(self), run_starts=runs(self).run_starts + np.int32(too_far))  # noqa: E731
    monkeypatch.setattr(StepRows, "runs", property(later))
    results = serve(engine, 1, range(10), SECOND[:1], releases=[1])
    assert results[0].bad_layer == 0
