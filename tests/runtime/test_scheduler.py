"""The scheduler against a fake gang: any mix of requests finishes, in order, within the limits."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leafsum.errors import ConfigError, PromptError
from leafsum.ranks.messages import Plan, RunResult
from leafsum.runtime.limits import Limits
from leafsum.runtime.request import Request
from leafsum.runtime.scheduler import Scheduler
from leafsum.runtime.settings import Settings

NUM_LAYERS = 4
LIMITS = Limits(prefill_chunk=4, concurrency=2, num_slots=3, num_pages=8, page_size=4, max_context=24)


class FakeGang:
    """Checks every plan as ranks would, and draws for position p of a request the token 100 + p."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.lengths: dict[int, int] = {}
        self.pages: dict[int, tuple[int, ...]] = {}

    def compute(self, plan: Plan) -> tuple[RunResult, ...]:
        for slot in plan.releases:
            del self.lengths[slot], self.pages[slot]
        for admit in plan.admits:
            assert admit.slot not in self.lengths
            assert admit.slot < self.limits.num_slots
            self.lengths[admit.slot] = 0
            self.pages[admit.slot] = admit.page_ids
        used = [page for pages in self.pages.values() for page in pages]
        assert len(used) == len(set(used)), "a page belongs to one slot"
        assert all(0 <= page < self.limits.num_pages for page in used)
        return tuple(self._run(run) for run in plan.runs)

    def _run(self, run) -> RunResult:
        assert run.start == self.lengths[run.slot]
        self.lengths[run.slot] += max(1, len(run.token_ids))
        assert self.lengths[run.slot] <= len(self.pages[run.slot]) * self.limits.page_size
        token_id = 100 + self.lengths[run.slot] if run.decides else -1
        return RunResult(
            slot=run.slot, token_id=token_id, residual_hash=1, bad_layer=-1, bad_position=-1, logits_sha256=""
        )


def serve(scheduler: Scheduler, gang: FakeGang) -> dict[int, tuple[list[int], str]]:
    finished = {}
    while plan := scheduler.plan():
        prompt_rows = sum(len(run.token_ids) for run in plan.runs)
        assert not scheduler.limits.prefill_chunk or prompt_rows <= scheduler.limits.prefill_chunk
        assert len(gang.lengths) - len(plan.releases) + len(plan.admits) <= scheduler.limits.concurrency
        for done in scheduler.apply(plan, gang.compute(plan)):
            if done.finish_reason:
                finished[done.request.request_id] = (done.request.output, done.finish_reason)
    assert scheduler.num_open == 0
    return finished


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 16), st.integers(1, 8)), min_size=1, max_size=12),
    prefill_chunk=st.integers(0, 20),
    concurrency=st.integers(1, 3),
    num_pages=st.integers(6, 12),
)
def test_every_request_finishes_whole_and_within_the_limits(sizes, prefill_chunk, concurrency, num_pages):
    limits = Limits(prefill_chunk, concurrency, num_slots=3, num_pages=num_pages, page_size=4, max_context=24)
    scheduler, gang = Scheduler(limits, NUM_LAYERS), FakeGang(limits)
    for request_id, (num_prompt, max_tokens) in enumerate(sizes):
        scheduler.submit(Request(request_id, tuple(range(num_prompt)), max_tokens, frozenset()))
    finished = serve(scheduler, gang)
    for request_id, (num_prompt, max_tokens) in enumerate(sizes):
        expected = [100 + num_prompt + index for index in range(max_tokens)]
        assert finished[request_id] == (expected, "length")


def test_a_request_is_admitted_only_when_its_whole_life_fits():
    limits = Limits(prefill_chunk=0, concurrency=3, num_slots=3, num_pages=5, page_size=4, max_context=20)
    scheduler = Scheduler(limits, NUM_LAYERS)
    for request_id in range(3):
        scheduler.submit(Request(request_id, (1, 2, 3), 5, frozenset()))  # two pages each
    plan = scheduler.plan()
    assert plan is not None
    assert [admit.slot for admit in plan.admits] == [0, 1]
    assert len(scheduler.waiting) == 1


def test_a_stop_id_ends_a_request_and_is_its_last_token():
    scheduler, gang = Scheduler(LIMITS, NUM_LAYERS), FakeGang(LIMITS)
    scheduler.submit(Request(0, (1, 2), 8, frozenset({104})))
    assert serve(scheduler, gang) == {0: ([102, 103, 104], "stop")}


def test_a_bad_row_fails_its_request_and_no_other():
    scheduler, gang = Scheduler(LIMITS, NUM_LAYERS), FakeGang(LIMITS)
    for request_id in range(2):
        scheduler.submit(Request(request_id, (1,), 3, frozenset()))
    plan = scheduler.plan()
    assert plan is not None
    first, second = gang.compute(plan)
    bad = RunResult(slot=first.slot, token_id=5, residual_hash=0, bad_layer=2, bad_position=0, logits_sha256="")
    failed, fine = scheduler.apply(plan, (bad, second))
    assert (failed.finish_reason, fine.finish_reason) == ("failed", "")
    assert "position 0" in failed.error
    assert "layer 2" in failed.error
    assert serve(scheduler, gang) == {1: ([101, 102, 103], "length")}


def test_a_cancelled_request_frees_its_slot_for_the_next_step():
    scheduler, gang = Scheduler(LIMITS, NUM_LAYERS), FakeGang(LIMITS)
    for request_id in range(3):
        scheduler.submit(Request(request_id, (1,), 8, frozenset()))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.apply(plan, gang.compute(plan))
    (cancelled,) = scheduler.cancel([0])
    assert cancelled is not None
    assert (cancelled.output, cancelled.residual_hash) == ([101], 1)
    assert scheduler.cancel([0]) == []
    after = scheduler.plan()
    assert after is not None
    assert len(after.releases) == 1
    assert len(after.admits) == 1


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "text"),
    [((), 4, "at least one token"), ((1,), 0, "max_tokens of at least 1"), ((1,) * 20, 5, "at most 4 tokens")],
)
def test_what_can_never_run_is_refused(prompt, max_tokens, text):
    with pytest.raises(PromptError, match=text):
        Scheduler(LIMITS, NUM_LAYERS).submit(Request(0, prompt, max_tokens, frozenset()))


def test_the_context_is_the_least_of_model_setting_and_cache():
    assert Limits.of(Settings(kv_tokens=100, page_size=64), 4096).max_context == 128
    assert Limits.of(Settings(max_context=50), 4096).max_context == 50
    assert Limits.of(Settings(), 40).max_context == 40
    with pytest.raises(ConfigError, match="at most 40"):
        Limits.of(Settings(max_context=41), 40)
