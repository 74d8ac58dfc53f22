"""The scheduler when gangs are lost: every request comes to what it would have come to, nothing is told twice, and a
request that kills ranks is found. Gangs are played: rows are a function of their slot's tokens, as the row law has it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leafsum.errors import RankMismatch
from leafsum.ranks.messages import Plan, Run, RunResult
from leafsum.runtime import scheduler as scheduler_module
from leafsum.runtime.limits import Limits
from leafsum.runtime.request import Request
from leafsum.runtime.scheduler import Scheduler

NUM_LAYERS = 2
LIMITS = Limits(prefill_chunk=5, concurrency=3, num_slots=4, num_pages=24, page_size=4, max_context=24)

POISON = 13
"""A gang that is to compute a row of this token dies."""


class GangDied(Exception):
    pass


@dataclass
class Slot:
    tokens: list[int] = field(default_factory=list)
    drawn: int = -1
    logits: bytes = b""


class FakeGang:
    """What a row comes to follows from the tokens up to it, and from `world`, which no gang may differ in."""

    def __init__(self, world: int = 0) -> None:
        self.world = world
        self.slots: dict[int, Slot] = {}

    def compute(self, plan: Plan) -> tuple[RunResult, ...]:
        for slot_id in plan.releases:
            del self.slots[slot_id]
        for admit in plan.admits:
            assert admit.slot not in self.slots
            self.slots[admit.slot] = Slot()
        if any(POISON in run.token_ids for run in plan.runs):
            raise GangDied
        return tuple(self._run(run) for run in plan.runs)

    def _run(self, run: Run) -> RunResult:
        slot = self.slots[run.slot]
        assert run.start == len(slot.tokens), "rows follow each other"
        assert run.token_ids or slot.drawn >= 0, "there is a token to go on from"
        residual_hash = 0
        hashes = b""
        for token_id in run.token_ids or (slot.drawn,):
            slot.tokens.append(token_id)
            hashes += self._digest(slot)
            residual_hash += int.from_bytes(hashes[-8:], "little")
        slot.drawn = 100 + hashes[-1] if run.decides else -1
        slot.logits += bytes([slot.drawn % 256]) if run.decides else b""
        return RunResult(
            slot=run.slot,
            token_id=slot.drawn,
            residual_hash=residual_hash % 2**64,
            bad_layer=-1,
            bad_position=-1,
            logits_sha256=hashlib.sha256(slot.logits).hexdigest() if run.decides else "",
            layer_hashes=hashes,
        )

    def _digest(self, slot: Slot) -> bytes:
        return hashlib.sha256(f"{self.world} {slot.tokens}".encode()).digest()[:8]


@dataclass
class Told:
    """What the pool hears of one request."""

    num_prompt_rows: int = 0
    token_ids: list[int] = field(default_factory=list)
    reason: str = ""
    error: str = ""
    facts: tuple[object, ...] = ()


class Finder:
    """A stop string that ends with a token of many."""

    def push(self, token_id: int) -> str:
        return "end" if token_id % 16 == 5 else ""


def serve(
    scheduler: Scheduler,
    losses: list[bool] | None = None,
    world_of_next: int = 0,
    cancels: dict[int, list[int]] | None = None,
) -> dict[int, Told]:
    """Every step, the next of `losses` says whether the gang is killed from outside in it; a poison kills it too.

    `cancels`: request ids by the number of the step before which they are cancelled.
    """
    told: dict[int, Told] = {request.request_id: Told() for request in scheduler.waiting}
    gang, remaining = FakeGang(), list(losses or [])
    while plan := scheduler.plan():
        num_known = sum(len(run.token_ids) for run in plan.runs)
        assert num_known <= (scheduler.limits.prefill_chunk or scheduler_module.MAX_PROMPT_ROWS)
        assert sum(len(run.token_ids) == 1 for run in plan.runs) <= scheduler_module.MAX_REDRAWN_ROWS + len(told)
        try:
            if remaining and remaining.pop(0):
                raise InterruptedError
            results = gang.compute(plan)
        except (GangDied, InterruptedError) as death:
            for culprit in scheduler.lose(plan, by_its_rows=isinstance(death, GangDied)):
                told[culprit.request_id].reason = "culprit"
            gang = FakeGang(world_of_next)
            continue
        for done in scheduler.apply(plan, results):
            heard = told[done.request.request_id]
            heard.num_prompt_rows += done.num_prompt_rows
            heard.token_ids += done.token_ids
            if done.finish_reason:
                assert not heard.reason, "one end"
                heard.reason, heard.error = done.finish_reason, done.error
                heard.facts = facts_of(done.request)
        for cancelled in scheduler.cancel((cancels or {}).get(scheduler.step, [])):
            heard = told[cancelled.request_id]
            assert not heard.reason, "one end"
            heard.reason, heard.facts = "cancelled", facts_of(cancelled)
    assert scheduler.num_open == 0
    assert len(scheduler._free_slots) == scheduler.limits.num_slots
    assert sorted(scheduler._free_pages) == list(range(scheduler.limits.num_pages))
    return told


def facts_of(request: Request) -> tuple[object, ...]:
    return request.residual_hash, request.logits_sha256, bytes(request.layer_hashes), tuple(request.output)


def scheduler_with(
    sizes: list[tuple[int, int]], limits: Limits = LIMITS, poisoned: int = -1, stop_ids: frozenset[int] = frozenset()
) -> Scheduler:
    """Requests by prompt and token limit; with `stop_ids`, every second has a stop string too."""
    scheduler = Scheduler(limits, NUM_LAYERS)
    for request_id, (num_prompt, max_tokens) in enumerate(sizes):
        prompt = [1000 + 50 * request_id + position for position in range(num_prompt)]
        if request_id == poisoned:
            prompt[-1] = POISON
        finder: Any = Finder() if stop_ids and request_id % 2 else None
        scheduler.submit(Request(request_id, tuple(prompt), max_tokens, stop_ids, finder))
    return scheduler


SIZES = st.lists(st.tuples(st.integers(1, 16), st.integers(1, 8)), min_size=1, max_size=8)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    sizes=SIZES,
    losses=st.lists(st.booleans(), max_size=60),
    prefill_chunk=st.sampled_from([0, 1, 5, 16]),
    num_pages=st.integers(6, 24),
    stop_ids=st.sampled_from([frozenset(), frozenset(range(100, 116))]),
)
def test_whenever_gangs_are_lost_every_request_comes_to_the_same(sizes, losses, prefill_chunk, num_pages, stop_ids):
    """Also where a step takes few rows of those that draw again, or of a prompt without a chunk."""
    limits = Limits(prefill_chunk, 3, num_slots=4, num_pages=num_pages, page_size=4, max_context=24)
    undisturbed = serve(scheduler_with(sizes, limits, stop_ids=stop_ids))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler_module, "MAX_REDRAWN_ROWS", 3)
        patch.setattr(scheduler_module, "MAX_PROMPT_ROWS", 7)
        assert serve(scheduler_with(sizes, limits, stop_ids=stop_ids), losses) == undisturbed
    for (num_prompt, max_tokens), told in zip(sizes, undisturbed.values(), strict=True):
        assert told.num_prompt_rows == num_prompt
        assert (len(told.token_ids), told.reason) == (max_tokens, "length") or told.reason == "stop"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    sizes=SIZES,
    losses=st.lists(st.booleans(), max_size=30),
    cancels=st.dictionaries(st.integers(1, 20), st.lists(st.integers(0, 7), max_size=3), max_size=6),
)
def test_a_request_that_is_cancelled_at_any_moment_has_the_hashes_of_the_tokens_that_were_told(sizes, losses, cancels):
    """Also while a new gang is behind what the lost one had computed. Nobody else comes to anything else."""
    undisturbed = serve(scheduler_with(sizes))
    told = serve(scheduler_with(sizes), losses, cancels=cancels)
    for request_id, heard in told.items():
        if heard.reason != "cancelled":
            assert heard == undisturbed[request_id]
        elif heard.token_ids:
            num_prompt, num_told = sizes[request_id][0], len(heard.token_ids)
            whole = scheduler_with([*sizes[:request_id], (num_prompt, num_told)])
            whole.cancel(range(request_id))
            assert heard.facts == serve(whole)[request_id].facts, "as if its limit had been what it has"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(sizes=SIZES, losses=st.lists(st.booleans(), max_size=30), poisoned=st.integers(0, 7))
def test_a_request_that_kills_ranks_is_found_and_no_other_is_taken_for_it(sizes, losses, poisoned):
    """Kills from outside come in between: they accuse nobody."""
    poisoned %= len(sizes)
    undisturbed = serve(scheduler_with(sizes))
    told = serve(scheduler_with(sizes, poisoned=poisoned), losses)
    assert told.pop(poisoned).reason == "culprit"
    assert told == {request_id: each for request_id, each in undisturbed.items() if request_id != poisoned}


def served(sizes: list[tuple[int, int]], num_steps: int) -> Scheduler:
    """After as many steps of one gang."""
    scheduler, gang = scheduler_with(sizes), FakeGang()
    for _ in range(num_steps):
        plan = scheduler.plan()
        scheduler.apply(plan, gang.compute(plan))
    return scheduler


def test_a_request_that_kills_ranks_loses_two_gangs_and_no_third():
    scheduler = scheduler_with([(3, 4), (4, 2), (2, 6)], poisoned=1)
    gang, num_lost = FakeGang(), 0
    while plan := scheduler.plan():
        try:
            scheduler.apply(plan, gang.compute(plan))
        except GangDied:
            num_lost += 1
            scheduler.lose(plan, by_its_rows=True)
            gang = FakeGang()
    assert num_lost == 2


def test_requests_under_suspicion_are_computed_one_by_one_and_together_again_once_past_it():
    scheduler = scheduler_with([(2, 6), (2, 6)])
    gang = FakeGang()
    scheduler.apply(plan := scheduler.plan(), gang.compute(plan))
    lost_plan = scheduler.plan()
    assert lost_plan is not None
    assert len(lost_plan.runs) == 2
    assert scheduler.lose(lost_plan, by_its_rows=True) == []
    gang = FakeGang()
    alone = []
    plan = scheduler.plan()
    while plan is not None and len({run.slot for run in plan.runs}) == 1:
        alone.append(plan.runs[0].slot)
        scheduler.apply(plan, gang.compute(plan))
        plan = scheduler.plan()
    assert len(set(alone)) == 2, "each had its turn"
    assert not any(request.suspect_rows or request.num_strikes for request in scheduler.live.values())


def test_only_rows_that_lost_a_gang_before_are_a_second_strike():
    scheduler = served([(2, 12)], num_steps=6)
    assert scheduler.lose(scheduler.plan(), by_its_rows=True) == []
    assert scheduler.waiting[0].suspect_rows == range(7, 8)
    assert scheduler.lose(scheduler.plan(), by_its_rows=True) == [], "the first rows again, which had come out before"
    assert (scheduler.waiting[0].num_strikes, scheduler.waiting[0].suspect_rows) == (1, range(8))
    assert [request.request_id for request in scheduler.lose(scheduler.plan(), by_its_rows=True)] == [0]


def test_a_row_that_was_finite_and_is_not_any_more_is_no_fault_of_the_request():
    scheduler = served([(4, 8)], num_steps=3)
    scheduler.lose(scheduler.plan(), by_its_rows=False)
    plan = scheduler.plan()
    first, *rest = FakeGang().compute(plan)
    bad = msgspec.structs.replace(first, bad_layer=1, bad_position=2)
    with pytest.raises(RankMismatch, match="expected finite values, as the lost gang had them, got values of"):
        scheduler.apply(plan, (bad, *rest))


def test_after_a_loss_the_oldest_are_first_again():
    """Those that had begun before those that had not, each as they came."""
    scheduler = served([(2, 6)] * 5, num_steps=1)
    assert len(scheduler.live) == 3
    scheduler.lose(None, by_its_rows=False)
    assert [request.request_id for request in scheduler.waiting] == [0, 1, 2, 3, 4]


def test_a_loss_while_idle_accuses_nobody():
    scheduler = scheduler_with([(2, 6)])
    gang = FakeGang()
    scheduler.apply(plan := scheduler.plan(), gang.compute(plan))
    assert scheduler.lose(None, by_its_rows=True) == []
    (request,) = scheduler.waiting
    assert (request.num_strikes, request.num_recoveries) == (0, 1)


@pytest.mark.parametrize("num_steps_before", [2, 3])
def test_a_new_gang_that_comes_to_other_rows_is_fatal_and_named(num_steps_before):
    """The first such row draws another token, or (where it happens to draw the same) has another residual."""
    losses = [False] * num_steps_before + [True]
    with pytest.raises(RankMismatch, match=r"after a recovery, request 0, position 3: expected token"):
        serve(scheduler_with([(4, 8)]), losses, world_of_next=1)


def test_a_new_gang_with_the_same_tokens_and_another_residual_is_fatal_and_named():
    scheduler = served([(4, 8)], num_steps=3)
    scheduler.lose(scheduler.plan(), by_its_rows=False)
    (request,) = scheduler.waiting
    assert request.lost is not None
    request.lost = replace(request.lost, residual_hash=request.lost.residual_hash ^ 1)
    gang = FakeGang()
    plan = scheduler.plan()
    scheduler.apply(plan, gang.compute(plan))
    plan = scheduler.plan()
    results = gang.compute(plan)
    with pytest.raises(RankMismatch, match=r"request 0, position 5: expected residual [0-9a-f]{16} of all rows"):
        scheduler.apply(plan, results)


def test_a_request_cancelled_before_the_new_gang_has_made_it_good_ends_as_it_was():
    scheduler = served([(4, 8)], num_steps=3)
    before = facts_of(scheduler.live[0])
    scheduler.lose(scheduler.plan(), by_its_rows=False)
    if plan := scheduler.plan():
        scheduler.apply(Plan(plan.step, (), plan.admits, plan.runs[:1]), FakeGang().compute(plan)[:1])
    assert [facts_of(request) for request in scheduler.cancel([0])] == [before]
    assert scheduler.num_open == 0


def test_draining_ends_what_has_not_begun_and_nothing_that_a_lost_gang_had_begun():
    scheduler = scheduler_with([(4, 8)] * 5)
    plan = scheduler.plan()
    scheduler.apply(plan, FakeGang().compute(plan))
    scheduler.lose(None, by_its_rows=False)
    assert [request.request_id for request in scheduler.drain()] == [3, 4]
    assert scheduler.num_open == 3
