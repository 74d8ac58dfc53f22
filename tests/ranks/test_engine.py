"""The engine in this process: a plan that does not fit changes nothing, and what one comes to hangs on its rows."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from leafsum.collectives.testing import run_ranks
from leafsum.collectives.transport import SingleRank, Transport
from leafsum.errors import ProtocolError
from leafsum.ranks.engine import Engine
from leafsum.ranks.messages import Admit, Plan, Run, RunResult
from leafsum.ranks.models.causal import ResidualWatch
from model_runs import build, run_single, whole
from oracle.hash import residual_hash
from oracle.head import argmax
from setups import make_setup
from tiny_checkpoints import Tensors, write_checkpoint

VOCAB_SIZE = 101
NUM_LAYERS = 2
MASK = 2**64 - 1
PROMPT = torch.randint(VOCAB_SIZE, (70,), generator=torch.Generator().manual_seed(1)).tolist()
OTHER = torch.randint(VOCAB_SIZE, (9,), generator=torch.Generator().manual_seed(2)).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


def engine_of(folder: Path, transport: Transport, **fields) -> Engine:
    """3 slots and 8 pages of 16 positions, at most 6 a slot, all NaN."""
    limits = {"tp": transport.num_ranks, "concurrency": 3, "kv_tokens": 128, "page_size": 16, "max_context": 96}
    setup = make_setup(folder, folder, transport.rank, **limits, **fields)
    engine = Engine(build(folder, transport, setup.dtype, layer_digests=setup.layer_digests), transport, setup)
    engine.memory.fill_nan()
    return engine


class Caller:
    """Numbers the plans of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.step = 0

    def __call__(
        self, *runs: Run, admits: Sequence[Admit] = (), releases: Sequence[int] = (), skip: int = 0
    ) -> tuple[RunResult, ...]:
        """One plan, `skip` numbers after the next. One that the engine refuses takes no number."""
        step = self.step + 1 + skip
        plan = Plan(step=step, releases=tuple(releases), admits=tuple(admits), runs=runs)
        result = self.engine.execute(plan)
        assert (result.step, result.rank) == (step, self.engine.setup.rank)
        self.step = step
        return result.runs


def admit(slot: int, *page_ids: int) -> Admit:
    return Admit(slot=slot, page_ids=page_ids)


def rows(slot: int, start: int, token_ids: Sequence[int], decides: bool = False) -> Run:
    return Run(slot=slot, start=start, token_ids=tuple(token_ids), decides=decides)


def draw(slot: int, start: int) -> Run:
    return rows(slot, start, (), decides=True)


def generate(
    call: Caller, slot: int, prompt: Sequence[int], borders: Sequence[int], num_tokens: int
) -> list[RunResult]:
    """The prompt in chunks cut at `borders`, then decode steps; one result a run. The slot is open and empty."""
    results = []
    for start, end in itertools.pairwise([0, *borders, len(prompt)]):
        results += call(rows(slot, start, prompt[start:end], decides=end == len(prompt)))
    for start in range(len(prompt), len(prompt) + num_tokens - 1):
        results += call(draw(slot, start))
    return results


def token_ids_of(results: Sequence[RunResult]) -> list[int]:
    return [result.token_id for result in results if result.token_id >= 0]


# Plans that do not fit


def open_two_slots(call: Caller) -> None:
    """Slot 0: pages 3, 1, ten positions filled and a token drawn. Slot 2: page 0, empty. Slot 1 is free."""
    call(rows(0, 0, PROMPT[:10], decides=True), admits=[admit(0, 3, 1), admit(2, 0)])


BAD_PLANS: dict[str, Callable[[Caller], object]] = {
    "a run of a slot that is not open": lambda call: call(rows(1, 0, [5])),
    "a run of a slot that does not exist": lambda call: call(rows(3, 0, [5])),
    "a run that starts too early": lambda call: call(rows(0, 9, [5])),
    "a run that starts too late": lambda call: call(rows(0, 11, [5])),
    "more rows than the pages hold": lambda call: call(rows(0, 10, [5] * 23)),
    "a decode run of a slot that has drawn nothing": lambda call: call(draw(2, 0)),
    "two runs of one slot that overlap": lambda call: call(rows(0, 10, [5]), rows(0, 10, [6])),
    "a decode run behind another run of its slot": lambda call: call(draw(0, 10), draw(0, 11)),
    "a token id outside the vocabulary": lambda call: call(rows(0, 10, [5, VOCAB_SIZE])),
    "a good run before a bad one": lambda call: call(rows(0, 10, [5]), rows(2, 1, [5])),
    "the release of a slot that is not open": lambda call: call(draw(0, 10), releases=[1]),
    "the same release twice": lambda call: call(draw(2, 0), releases=[0, 0]),
    "the admission to an open slot": lambda call: call(draw(0, 10), admits=[admit(2, 5)]),
    "the admission to a slot that does not exist": lambda call: call(draw(0, 10), admits=[admit(3, 5)]),
    "two admissions to one slot": lambda call: call(draw(0, 10), admits=[admit(1, 5), admit(1, 6)]),
    "more pages than a slot may have": lambda call: call(admits=[admit(1, *range(7))], releases=[0, 2]),
    "a page that does not exist": lambda call: call(admits=[admit(1, 5, 8)]),
    "a page of another slot": lambda call: call(admits=[admit(1, 5, 1)]),
    "a page to two slots": lambda call: call(rows(1, 0, [5]), admits=[admit(1, 5), admit(2, 4, 5)], releases=[2]),
    "one page twice": lambda call: call(admits=[admit(1, 5, 5)]),
    "a step that was done": lambda call: call(draw(0, 10), skip=-1),
    "a step that is not the next": lambda call: call(draw(0, 10), skip=1),
    "good admissions and releases before a bad run": lambda call: call(
        draw(0, 10), rows(1, 7, [5]), admits=[admit(1, 0)], releases=[2]
    ),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_a_plan_that_does_not_fit_is_refused_and_changes_nothing(folder, name):
    call, undisturbed = (Caller(engine_of(folder, SingleRank(), digests=True)) for _ in range(2))
    for each in (call, undisturbed):
        open_two_slots(each)
    with pytest.raises(ProtocolError):
        BAD_PLANS[name](call)
    assert state_of(call.engine) == state_of(undisturbed.engine)
    following = [draw(0, 10), rows(2, 0, OTHER, decides=True)]
    assert call(*following) == undisturbed(*following)


def state_of(engine: Engine) -> dict[int, tuple[object, ...]]:
    """All that a slot is, its pages included."""
    return {
        slot_id: (
            slot.page_ids,
            slot.length,
            slot.last_token_id,
            slot.logits_sha256.hexdigest(),
            engine.page_table[slot_id, : len(slot.page_ids)].tolist(),
        )
        for slot_id, slot in engine.slots.items()
    }


# Layer hashes


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("borders", [[], [1, 33, 64]])
def test_layer_hashes_are_those_of_every_row_after_every_layer(folder, num_ranks, borders):
    def hashes_on_rank(transport: Transport) -> bytes:
        call = Caller(engine_of(folder, transport, layer_digests=True))
        call(admits=[admit(0, 0, 1, 2, 3, 4)])
        results = generate(call, 0, PROMPT, borders, 4)
        assert sum(int(h) for r in results for h in as_rows(r.layer_hashes)[:, -1]) & MASK == (
            sum(r.residual_hash for r in results) & MASK
        )
        return b"".join(result.layer_hashes for result in results)

    found = run_ranks(num_ranks, hashes_on_rank)
    assert len(found[0]) == (len(PROMPT) + 3) * NUM_LAYERS * 8
    assert set(found) == {hashes_of_layers(folder)}


def as_rows(layer_hashes: bytes) -> np.ndarray:
    return np.frombuffer(layer_hashes, dtype="<u8").reshape(-1, NUM_LAYERS)


@functools.cache
def hashes_of_layers(folder: Path) -> bytes:
    """The same of one rank, a row a step, by the oracle's hash of each layer's residual."""
    residuals: list[np.ndarray] = []
    call = Caller(engine_of(folder, SingleRank()))
    after_layer = ResidualWatch.after_layer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ResidualWatch, "after_layer", lambda self, x: (residuals.append(x.numpy().copy()), after_layer(self, x))
        )
        call(admits=[admit(0, 0, 1, 2, 3, 4)])
        generate(call, 0, PROMPT, list(range(1, len(PROMPT))), 4)
    hashes = [residual_hash(x, np.array([index // NUM_LAYERS])) for index, x in enumerate(residuals)]
    return np.array(hashes, dtype="<u8").tobytes()


# Slots come and go


def test_a_reopened_slot_knows_nothing_of_its_past(folder):
    call, fresh = (Caller(engine_of(folder, SingleRank(), digests=True)) for _ in range(2))
    call(admits=[admit(0, 0, 1, 2, 3, 4)])
    generate(call, 0, PROMPT, [], 5)
    call(admits=[admit(0, 2, 7), admit(1, 0)], releases=[0])  # one plan: releases come first
    fresh(admits=[admit(0, 0, 1)])
    assert generate(call, 0, OTHER, [4], 5) == generate(fresh, 0, OTHER, [4], 5)


def test_a_released_slot_is_closed_and_its_pages_are_free(folder):
    call = Caller(engine_of(folder, SingleRank()))
    call(admits=[admit(0, 0, 1), admit(1, 2)])
    call(rows(1, 0, OTHER, decides=True), releases=[0])
    with pytest.raises(ProtocolError, match="slot 0"):
        call(rows(0, 0, [5]))
    call(draw(1, len(OTHER)), admits=[admit(2, 1, 0)])


def test_requests_together_come_to_what_they_come_to_alone(folder):
    alone, together = (Caller(engine_of(folder, SingleRank(), digests=True)) for _ in range(2))
    alone(admits=[admit(0, 0, 1, 2, 3, 4), admit(1, 5)])
    expected = [generate(alone, 0, PROMPT, [], 3), generate(alone, 1, OTHER, [], 3)]
    together(admits=[admit(2, 6, 2, 0, 1, 7), admit(0, 3)])
    steps = [together(rows(0, 0, OTHER, decides=True), rows(2, 0, PROMPT, decides=True))]
    steps += [together(draw(2, 70 + index), draw(0, 9 + index)) for index in range(2)]
    first_by_slot = [[next(r for r in step if r.slot == slot) for step in steps] for slot in (2, 0)]
    assert [list(map(without_slot, each)) for each in first_by_slot] == [
        list(map(without_slot, each)) for each in expected
    ]


def test_two_runs_of_a_slot_in_one_plan_are_two_chunks(folder):
    call, in_two_plans = (Caller(engine_of(folder, SingleRank(), digests=True)) for _ in range(2))
    chunks = [rows(0, 0, OTHER[:4]), rows(0, 4, OTHER[4:], decides=True)]
    opened = [admit(0, 5)]
    expected = (*in_two_plans(chunks[0], admits=opened), *in_two_plans(chunks[1]))
    assert call(*chunks, admits=opened) == expected


def without_slot(result: RunResult) -> tuple[object, ...]:
    return (result.token_id, result.residual_hash, result.bad_layer, result.bad_position, result.logits_sha256)


# What a request comes to


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_tokens_and_digests_are_those_of_the_whole_rows(folder, num_ranks):
    """Teacher forcing: the model over prompt and drawn tokens at once must choose each drawn token, by the oracle."""

    def generate_on_rank(transport: Transport) -> list[RunResult]:
        call = Caller(engine_of(folder, transport, digests=True))
        call(admits=[admit(1, 6, 2, 0, 1, 7)])
        return generate(call, 1, PROMPT, [1, 33], 6)

    ranks = run_ranks(num_ranks, generate_on_rank)
    results = ranks[0]
    assert all(each == results for each in ranks)
    sequence = PROMPT + token_ids_of(results)[:-1]
    run = run_single(folder, [sequence], whole([sequence]), "bfloat16")
    decided = run.logits[len(PROMPT) - 1 :]
    assert token_ids_of(results) == argmax(decided)[1].tolist()
    digests = [hashlib.sha256(decided[: 1 + index].astype("<f4").tobytes()).hexdigest() for index in range(6)]
    assert [result.logits_sha256 for result in results] == ["", "", *digests]


@pytest.mark.parametrize("borders", [[], [1], [64], [5, 6, 40], list(range(1, 70))], ids=len)
def test_the_residual_hash_of_a_request_does_not_depend_on_its_chunks(folder, borders):
    call = Caller(engine_of(folder, SingleRank()))
    call(admits=[admit(0, 0, 1, 2, 3, 4)])
    results = generate(call, 0, PROMPT, borders, 4)
    sequence = PROMPT + token_ids_of(results)[:-1]
    run = run_single(folder, [sequence], whole([sequence]), "bfloat16")
    row_hashes = residual_hash(run.residual, np.arange(len(sequence), dtype=np.int32)).tolist()
    assert sum(result.residual_hash for result in results) & MASK == sum(row_hashes) & MASK
    ends = [*borders, *range(len(PROMPT), len(sequence) + 1)]
    expected = [sum(row_hashes[start:end]) & MASK for start, end in itertools.pairwise([0, *ends])]
    assert [result.residual_hash for result in results] == expected


def test_the_first_row_that_is_not_finite_is_named(folder, tmp_path):
    def infinite_token(tensors: Tensors) -> None:
        tensors["model.embed_tokens.weight"][7] = torch.inf

    call = Caller(engine_of(write_checkpoint(tmp_path, edit=infinite_token), SingleRank()))
    clean = Caller(engine_of(folder, SingleRank()))
    for each in (call, clean):
        each(rows(1, 0, OTHER[:3]), admits=[admit(0, 0), admit(1, 1)])
    bad, fine = call(rows(0, 0, [5, 7, 6, 7], decides=True), rows(1, 3, OTHER[3:], decides=True))
    assert (bad.bad_layer, bad.bad_position) == (0, 1)
    assert (fine,) == clean(rows(1, 3, OTHER[3:], decides=True))


@pytest.mark.parametrize("digests", [True, False])
def test_logits_that_are_not_finite_are_told_from_layers(tmp_path, digests):
    """Only rank 1 holds the bad row of the head, and all ranks say the same of it."""

    def infinite_logit(tensors: Tensors) -> None:
        tensors["lm_head.weight"][60] = torch.nan

    stored = write_checkpoint(tmp_path, edit=infinite_logit)

    def run_on_rank(transport: Transport) -> tuple[RunResult, ...]:
        call = Caller(engine_of(stored, transport, digests=digests))
        return call(rows(0, 0, OTHER[:4]), rows(1, 0, OTHER, decides=True), admits=[admit(0, 0), admit(1, 1)])

    ranks = run_ranks(2, run_on_rank)
    assert ranks[0] == ranks[1]
    assert [(result.bad_layer, result.bad_position) for result in ranks[0]] == [(-1, -1), (NUM_LAYERS, 8)]
