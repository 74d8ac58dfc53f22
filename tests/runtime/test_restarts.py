"""A lost gang and the next one, played over the real sockets: what the pool hears, what the new ranks are told, and
which losses are final."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from leafsum.errors import (
    ConfigError,
    DeadlineExceeded,
    LeafsumError,
    ModelError,
    ProtocolError,
    RankError,
    RankLost,
    RankMismatch,
)
from leafsum.ranks.messages import Run, RunResult
from leafsum.runtime import restarts as restarts_module
from leafsum.runtime.messages import Advance, Cancel, CatchingUp, Finished, GangLost, GangRecovered
from leafsum.runtime.restarts import Restarts, can_be_recovered, can_be_tried_again, is_from_outside
from leafsum.runtime.settings import Settings
from processes import all_gone, wait_until
from runtime.fake_run import FIRST_TOKEN, NUM_RANKS, SECOND_PLAN, changed


def lose(run, gang: int = 1, num_ranks: int = NUM_RANKS) -> GangLost:
    """Rank 1 is killed; its gang ends, and the next one is awaited."""
    old = [rank.child for rank in run.ranks]
    killed = run.ranks[1].child
    run.await_gang(gang, num_ranks)
    killed.send_signal(signal.SIGKILL)
    lost = run.hear()
    assert isinstance(lost, GangLost)
    wait_until(lambda: is_there(run), "a new gang")
    assert all_gone(child.pid for child in old), "the old gang ends before the new one starts"
    return lost


def is_there(run) -> bool:
    """Whether every rank of the gang has been started."""
    return all(hasattr(rank, "child") for rank in run.ranks)


def replay_result(rank, plan, tokens: dict[int, int]):
    """An honest answer whose token at a position is that of `tokens`."""
    result = rank.result(plan)
    runs = tuple(
        changed(done, token_id=tokens[run.start + len(run.token_ids)] if run.decides else -1)
        for run, done in zip(plan.runs, result.runs, strict=True)
    )
    return changed(result, runs=runs)


@pytest.fixture
def run(make_run):
    """The second step is under way, in a run that recovers."""
    run = make_run(recover="same")
    run.second_step()
    return run


def test_the_pool_hears_of_a_loss_and_of_the_new_gang_and_the_request_goes_on(run):
    lost = lose(run)
    assert (lost.number, lost.rank, lost.step, lost.num_open) == (1, 1, 2, 1)
    assert "rank 1 of 3" in lost.cause
    assert "at step 2: signal SIGKILL" in lost.cause
    assert lost.timeout_s > run.settings.start_timeout_s
    setups = run.come_up()
    assert {setup.previous_step for setup in setups} == {2}, "steps are numbered on"
    assert {setup.store_path for setup in setups} == {str(run.folder.store(1))}
    recovered = run.hear()
    assert isinstance(recovered, GangRecovered)
    assert (recovered.number, recovered.num_ranks) == (1, NUM_RANKS)
    assert recovered.pids == tuple(rank.child.pid for rank in run.ranks)
    assert not run.folder.ranks_socket(0).exists(), "what the old gang left is removed"
    for rank in run.ranks:
        plan = rank.hear_plan()
        assert plan.step == 3
        assert [admit.slot for admit in plan.admits] == [0]
        known, redrawn = plan.runs
        assert known == Run(slot=0, start=0, token_ids=(1, 2), decides=True)
        assert redrawn == Run(slot=0, start=2, token_ids=(41,), decides=True)
        answer = replay_result(rank, plan, {2: 41, 3: 42})
        same_hash = (changed(answer.runs[0], residual_hash=2**64 - 1), answer.runs[1])
        rank.say(changed(answer, runs=same_hash))
    assert run.hear() == Advance(request_id=0, num_prompt_rows=0, token_ids=(42,)), "nothing is told twice"


def test_a_long_way_back_is_no_silence(make_run):
    """A step that brings nothing new is a word to the pool all the same, which waits for one."""
    run = make_run(recover="same", prefill_chunk=1)
    run.start()
    run.submit()
    for step in (1, 2, 3):
        for rank in run.ranks:
            plan = rank.hear_plan()
            if step < 3:
                rank.say(rank.result(plan))
        if step < 3:
            assert isinstance(run.hear(), Advance)
    lose(run)
    run.come_up()
    assert isinstance(run.hear(), GangRecovered)
    for step in (4, 5):
        for rank in run.ranks:
            plan = rank.hear_plan()
            hashes = {4: 2**64 - 1, 5: 2**64 - 2}
            answer = replay_result(rank, plan, {1: -1, 2: 42})
            rank.say(changed(answer, runs=(changed(answer.runs[0], residual_hash=hashes[step]),)))
        assert run.hear() == CatchingUp(step=step)
    for rank in run.ranks:
        plan = rank.hear_plan()
        assert plan.runs == (Run(slot=0, start=2, token_ids=(), decides=True),)
        rank.say(rank.result(plan))
    assert isinstance(run.hear(), Advance)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"token_id": 7}, "expected token 41, which the lost gang drew and which was told, got 7"),
        ({"residual_hash": 5}, "expected residual ffffffffffffffff of all rows"),
        ({"logits_sha256": "cd" * 32}, "of all rows"),
    ],
)
def test_a_new_gang_that_does_not_come_to_the_same_ends_the_run(run, change, told):
    lose(run)
    run.come_up()
    assert isinstance(run.hear(), GangRecovered)
    for rank in run.ranks:
        plan = rank.hear_plan()
        answer = replay_result(rank, plan, {2: 41, 3: 42})
        first: RunResult = changed(answer.runs[0], **{"residual_hash": 2**64 - 1, **change})
        rank.say(changed(answer, runs=(first, answer.runs[1])))
    error = run.error(after=[FIRST_TOKEN])
    assert type(error) is RankMismatch
    assert told in str(error)


@pytest.mark.parametrize(
    ("deed", "cause"),
    [
        (lambda rank: rank.say(rank.failure()), "rank 1 of 3 failed at step 2: ValueError"),
        (lambda rank: rank.say_bytes(b"\xff no message"), r"rank 1 \(pid \d+\) at step 2: expected a"),
    ],
    ids=["exception", "corrupt message"],
)
def test_what_one_rank_does_wrong_is_recovered_and_named(run, deed, cause):
    speaker = run.ranks[1]
    run.await_gang(1)
    deed(speaker)
    lost = run.hear()
    assert isinstance(lost, GangLost)
    assert (lost.rank, lost.step) == (1, 2)
    assert re.match(cause, lost.cause)


def test_a_request_that_kills_its_ranks_twice_alone_is_returned_as_failed_and_the_pool_goes_on(make_run):
    """The two starts that it cost are all that are allowed, and count no more."""
    run = make_run(recover="same", recover_limit=2)
    run.second_step()
    for gang in (1, 2):
        speaker = run.ranks[2]
        run.await_gang(gang)
        speaker.say(speaker.failure(step=gang + 1))
        lost = run.hear()
        assert isinstance(lost, GangLost)
        if gang == 2:
            finished = run.hear()
            assert isinstance(finished, Finished)
            assert (finished.request_id, finished.reason, finished.num_recoveries) == (0, "failed", 1)
            assert "twice with the same rows; it is given up: rank 2 of 3 failed" in finished.error
        run.come_up()
        assert isinstance(run.hear(), GangRecovered)
        if gang == 1:
            for rank in run.ranks:
                rank.hear_plan()
    lose(run, gang=3)
    run.come_up()
    assert isinstance(run.hear(), GangRecovered)
    run.submit(request_id=1, max_tokens=1)
    for rank in run.ranks:
        plan = rank.hear_plan()
        rank.say(rank.result(plan))
    assert isinstance(run.hear(), Advance)


def test_two_ranks_that_disagree_are_never_recovered(run):
    run.answer(1)
    wrong = run.ranks[1].result(SECOND_PLAN)
    run.ranks[1].say(changed(wrong, runs=(changed(wrong.runs[0], token_id=9),)))
    assert type(run.error(after=[FIRST_TOKEN])) is RankMismatch


def test_the_limit_of_starts_ends_the_run_with_the_last_cause(make_run):
    run = make_run(recover="same", recover_limit=1)
    run.second_step()
    lose(run)
    run.come_up()
    assert isinstance(run.hear(), GangRecovered)
    for rank in run.ranks:
        rank.hear_plan()
    run.ranks[0].child.send_signal(signal.SIGKILL)
    error = run.error(after=[FIRST_TOKEN])
    assert type(error) is RankLost
    assert error.role == "rank 0"
    assert "1 of at most 1 starts (--recover-limit) were made within 600 s" in str(error)
    assert any("step 3 plan" in line for line in error.events), "the record of that rank comes along"


def test_a_gang_that_does_not_come_up_is_tried_again(run):
    lose(run)
    mute = run.ranks[2].child
    run.await_gang(2)
    mute.send_signal(signal.SIGKILL)
    again = run.hear()
    assert isinstance(again, GangLost)
    assert (again.number, again.rank, again.step) == (2, 2, -1)
    run.come_up()
    recovered = run.hear()
    assert isinstance(recovered, GangRecovered)
    assert recovered.number == 2


def test_with_shrink_fewer_ranks_are_tried_where_as_many_cannot_be_had(make_run):
    run = make_run(recover="shrink", recover_limit=1)
    run.second_step()
    lose(run)
    for gang, num_ranks in ((2, 2), (3, 1)):
        unable = run.ranks[0]
        run.await_gang(gang, num_ranks)
        unable.say(unable.hello())
        unable.child.send_signal(signal.SIGKILL)
        lost = run.hear()
        assert isinstance(lost, GangLost)
        assert lost.number == gang
        wait_until(lambda: is_there(run), "the next gang")
    run.come_up()
    recovered = run.hear()
    assert isinstance(recovered, GangRecovered)
    assert (recovered.number, recovered.num_ranks) == (3, 1)


def test_a_model_that_cannot_be_read_again_is_the_callers_to_mend(run):
    lose(run)
    rank = run.ranks[2]
    for each in run.ranks:
        each.say(each.hello())
    for each in run.ranks:
        each.hear()
    rank.say(rank.failure(ModelError.__name__, step=-1))
    assert type(run.error(after=[FIRST_TOKEN])) is ModelError


def test_a_cancel_that_comes_while_a_gang_is_started_is_obeyed_after_it(run):
    lose(run)
    run.tell(Cancel(request_ids=(0,)))
    run.come_up()
    assert isinstance(run.hear(), GangRecovered)
    finished = run.hear()
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.num_output_tokens, finished.num_recoveries) == ("cancelled", 1, 1)
    assert finished.residual_hash == 2**64 - 1, "of the rows that were computed, though no gang has them now"


def test_a_pool_that_closes_while_a_gang_is_started_ends_all(run):
    lose(run)
    run.close_pool()
    run.outcome()
    assert all_gone(child.pid for child in run.children)
    assert not run.folder.path.exists()


# The policy


def test_starts_are_counted_within_the_window(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(restarts_module.time, "monotonic", lambda: now_s[0])
    restarts = Restarts(Settings(tp=3, recover_limit=2, recover_window_s=10.0))
    assert next(restarts.sizes()) == 3
    now_s[0] = 105.0
    sizes = restarts.sizes()
    assert next(sizes) == 3
    assert list(sizes) == [], "two in ten seconds"
    now_s[0] = 111.0
    assert next(restarts.sizes()) == 3, "the first is too long ago"
    assert list(restarts.sizes()) == []
    assert "2 of at most 2 starts" in restarts.why_no_more()


def test_starts_that_a_request_has_cost_are_forgiven():
    restarts = Restarts(Settings(tp=1, recover_limit=2))
    assert list(restarts.sizes()) == [1, 1]
    restarts.forgive(1)
    assert list(restarts.sizes()) == [1]
    restarts.forgive(5)
    assert list(restarts.sizes()) == [1, 1]


def test_how_large_a_gang_is_tried(monkeypatch):
    assert list(Restarts(Settings(tp=3, recover="shrink", recover_limit=1)).sizes()) == [3, 2, 1]
    assert list(Restarts(Settings(tp=3, recover="same", recover_limit=2)).sizes()) == [3, 3]
    now_s = [0.0]
    monkeypatch.setattr(restarts_module.time, "monotonic", lambda: now_s[0])
    sizes = []
    for num_ranks in Restarts(Settings(tp=2, recover_limit=3, recover_window_s=600.0)).sizes():
        sizes.append(num_ranks)
        now_s[0] += 1000.0
    assert sizes == [2, 2, 2], "starts that take longer than the window have an end too"
    assert list(Restarts(Settings(tp=2, recover="shrink", recover_limit=2)).sizes()) == [2, 1, 2, 1]
    never = Restarts(Settings(tp=3, recover="never"))
    assert list(never.sizes()) == []
    assert never.why_no_more() == ""


def lost(exit_status: int) -> RankLost:
    return RankLost("gone", role="rank 1", exit_status=exit_status)


LATE = DeadlineExceeded("late", what="step 3", timeout_s=1.0)


@pytest.mark.parametrize(
    ("error", "has_stopped_rank", "num_oom_kills", "expected"),
    [
        (lost(-signal.SIGKILL), False, 0, True),
        (lost(-signal.SIGKILL), False, 1, False),
        (lost(-signal.SIGTERM), False, 1, True),
        (lost(-signal.SIGUSR1), False, 0, True),
        (lost(-signal.SIGXCPU), False, 0, True),
        (lost(-signal.SIGABRT), False, 0, False),
        (lost(-signal.SIGSEGV), False, 0, False),
        (lost(-signal.SIGBUS), False, 0, False),
        (lost(1), False, 0, False),
        (lost(0), False, 0, False),
        (LATE, True, 0, True),
        (LATE, False, 0, False),
        (RankError("raised", rank=1, step=2), True, 0, False),
        (ProtocolError("garbled", rank=1), False, 0, False),
    ],
)
def test_whose_doing_a_loss_is(error, has_stopped_rank, num_oom_kills, expected):
    found = is_from_outside(error, has_stopped_rank=has_stopped_rank, num_oom_kills=num_oom_kills)
    assert found is expected


def test_which_losses_are_final():
    assert can_be_recovered(lost(1))
    assert can_be_recovered(LATE)
    assert can_be_recovered(ProtocolError("garbled", rank=1))
    assert not can_be_recovered(RankMismatch("differ", rank=1, step=2))
    assert not can_be_recovered(ModelError("unreadable"))
    for how, error, expected in (
        ("same", ModelError("unreadable"), False),
        ("same", ConfigError("no memory"), False),
        ("same", LeafsumError("cannot start"), True),
        ("shrink", ConfigError("no memory"), True),
        ("shrink", RankMismatch("differ", rank=1, step=2), False),
        ("same", lost(1), True),
    ):
        assert can_be_tried_again(error, how) is expected


def test_the_kernels_count_of_kills_for_want_of_memory_is_read():
    told = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    assert restarts_module.count_oom_kills() == int(told["oom_kill"])
