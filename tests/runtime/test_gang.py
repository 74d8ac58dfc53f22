"""Ranks that lie, babble, fail, die or fall silent: the run ends with the cause by name, and the step gives no token.

Every test drives a whole coordinator; ranks are played over the real socket, the processes behind them are stand-ins.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import zmq
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
from leafsum.ranks.control import open_socket
from leafsum.ranks.messages import Plan, Run, StepResult, encode
from leafsum.runtime import gang as gang_module
from leafsum.runtime.fatal import error_of
from leafsum.runtime.messages import Advance, Fatal, Finished
from processes import all_gone
from runtime.fake_run import FIRST_TOKEN, NUM_RANKS, FakeRank, FakeRun, changed

SECOND_PLAN = Plan(step=2, releases=(), admits=(), runs=(Run(slot=0, start=2, token_ids=(), decides=True),))


@pytest.fixture
def make_run(tmp_path_factory, monkeypatch):
    """Makes runs. Looking for a cause takes as long as it takes: only tests without one shorten it."""
    monkeypatch.setattr(gang_module, "CAUSE_TIMEOUT_S", 60.0)
    runs = []

    def make(*manners: str) -> FakeRun:
        runs.append(FakeRun(tmp_path_factory.mktemp("run"), monkeypatch, manners or ("polite",) * NUM_RANKS))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


@pytest.fixture
def run(make_run) -> FakeRun:
    """One request has its first token, and the second step is under way."""
    run = make_run()
    run.start()
    run.first_step()
    for rank in run.ranks:
        assert rank.hear_plan() == SECOND_PLAN
    return run


def error_after_first_token(run: FakeRun) -> LeafsumError:
    """The error that the pool raises. Nothing but the first token has left, and nothing is left."""
    told = run.outcome()
    assert told[:-1] == [FIRST_TOKEN]
    return last_error(run)


def last_error(run: FakeRun) -> LeafsumError:
    fatal = run.outcome()[-1]
    assert isinstance(fatal, Fatal)
    assert all_gone(child.pid for child in run.children)
    assert not run.folder.path.exists()
    return error_of(fatal)


def answer(run: FakeRun, *but: int) -> None:
    """The honest results of step 2, of all ranks but some."""
    for rank in run.ranks:
        if rank.rank not in but:
            rank.say(second(rank))


def second(rank: FakeRank) -> StepResult:
    return rank.result(SECOND_PLAN)


# Honest ranks


def test_honest_ranks_serve_a_request_to_its_end(run):
    answer(run)
    assert run.hear() == Advance(request_id=0, num_prompt_rows=0, token_ids=(42,))
    for step in range(3, 9):
        for rank in run.ranks:
            plan = rank.hear_plan()
            assert plan.step == step
            rank.say(rank.result(plan))
        assert run.hear() == Advance(request_id=0, num_prompt_rows=0, token_ids=(40 + step,))
    residual_hash = -sum(range(1, 9)) % 2**64
    assert run.hear() == Finished(
        request_id=0, reason="length", residual_hash=residual_hash, logits_sha256="ab" * 32, error=""
    )
    run.close_pool()
    assert run.outcome() == [FIRST_TOKEN]
    assert all_gone(child.pid for child in run.children)
    assert [child.exit_status() for child in run.children] == [0, 0, 0]
    assert not run.folder.path.exists()


def test_no_token_leaves_before_the_last_rank_has_answered(run):
    answer(run, 1)
    assert not run.pool.poll(300)
    run.ranks[1].say(second(run.ranks[1]))
    assert run.hear() == Advance(request_id=0, num_prompt_rows=0, token_ids=(42,))


# Lies


def in_run(**changes) -> Callable[[StepResult], StepResult]:
    return lambda result: changed(result, runs=(changed(result.runs[0], **changes),))


LIES: dict[str, Callable[[StepResult], StepResult]] = {
    "token": in_run(token_id=43),
    "no token": in_run(token_id=-1),
    "residual hash": in_run(residual_hash=2**64 - 3),
    "one bit of the residual hash": in_run(residual_hash=(2**64 - 2) ^ (1 << 63)),
    "logits": in_run(logits_sha256="ab" * 31 + "ac"),
    "bad layer": in_run(bad_layer=0),
    "bad position": in_run(bad_position=2),
    "slot": in_run(slot=1),
    "step before": lambda result: changed(result, step=1),
    "step after": lambda result: changed(result, step=3),
    "no runs": lambda result: changed(result, runs=()),
    "a run more": lambda result: changed(result, runs=result.runs * 2),
}


@pytest.mark.parametrize("liar", [1, 2])
@pytest.mark.parametrize("lie", LIES)
def test_a_rank_that_lies_ends_the_run_and_is_named(run, lie, liar):
    answer(run, liar)
    run.ranks[liar].say(LIES[lie](second(run.ranks[liar])))
    error = error_after_first_token(run)
    assert type(error) is RankMismatch
    assert (error.rank, error.step) == (liar, 2)
    assert f"rank {liar}" in str(error)
    assert "step 2" in str(error)


@pytest.mark.parametrize("lie", ["slot", "step before", "step after", "no runs", "a run more"])
def test_a_result_that_is_none_of_the_plan_is_refused_even_where_all_agree(run, lie):
    for rank in run.ranks:
        rank.say(LIES[lie](second(rank)))
    error = error_after_first_token(run)
    assert type(error) is RankMismatch
    assert error.step == 2


def test_a_difference_names_both_sides(run):
    answer(run, 2)
    run.ranks[2].say(in_run(token_id=77, residual_hash=10)(second(run.ranks[2])))
    text = str(error_after_first_token(run))
    for part in ("slot 0", "token 42", "fffffffffffffffe", "token 77", "000000000000000a"):
        assert part in text


# Words out of turn


def test_a_rank_that_answers_twice_is_refused(run):
    run.ranks[1].say(second(run.ranks[1]))
    run.ranks[1].say(second(run.ranks[1]))
    error = error_after_first_token(run)
    assert type(error) is ProtocolError
    assert "rank 1" in str(error)


def test_a_second_answer_after_the_step_is_not_taken_for_the_next(run):
    answer(run)
    assert isinstance(run.hear(), Advance)
    stale = second(run.ranks[1])
    for rank in run.ranks:
        plan = rank.hear_plan()
        rank.say(stale if rank.rank == 1 else rank.result(plan))
    error = error_after_first_token(run)
    assert type(error) is RankMismatch
    assert (error.rank, error.step) == (1, 3)


@pytest.mark.parametrize("word", ["hello", "ready", "result"])
def test_a_word_while_idle_ends_the_run(make_run, word):
    run = make_run()
    run.start()
    rank = run.ranks[1]
    rank.say({"hello": rank.hello, "ready": rank.ready, "result": lambda: second(rank)}[word]())
    error = last_error(run)
    assert type(error) is ProtocolError
    assert "rank 1" in str(error)
    assert "idle" in str(error)


@pytest.mark.parametrize("word", ["hello", "ready"])
def test_an_answer_of_another_kind_is_refused(run, word):
    answer(run, 1)
    rank = run.ranks[1]
    rank.say(rank.hello() if word == "hello" else rank.ready())
    error = error_after_first_token(run)
    assert type(error) is ProtocolError
    assert "StepResult" in str(error)
    assert word.capitalize() in str(error)


def test_a_rank_that_speaks_as_another_is_refused(run):
    answer(run, 1, 2)
    run.ranks[1].say(second(run.ranks[2]))
    error = error_after_first_token(run)
    assert type(error) is ProtocolError
    assert "rank 1 speaks as rank 2" in str(error)


GARBAGE = {
    "nothing": b"",
    "no MessagePack": b"\xc1",
    "deep nesting": b"\x91" * 5000,
    "an empty map": b"\x80",
    "a message that only coordinators send": encode(SECOND_PLAN),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_ends_the_run_and_its_speaker_is_named(run, name):
    answer(run, 1)
    run.ranks[1].say_bytes(GARBAGE[name])
    error = error_after_first_token(run)
    assert type(error) is ProtocolError
    assert "rank 1" in str(error)


def test_a_stranger_is_refused(run):
    answer(run, 1)
    with open_socket(run.context, zmq.DEALER, run.folder.ranks_socket, bind=False, identity=b"other:1") as stranger:
        stranger.send(b"")
    error = error_after_first_token(run)
    assert type(error) is ProtocolError
    assert "other:1" in str(error)


# Failures


@pytest.mark.parametrize("others_answer", [True, False])
def test_a_failure_comes_back_with_rank_step_and_traceback(run, others_answer):
    if others_answer:
        answer(run, 1)
    run.ranks[1].say(run.ranks[1].failure())
    error = error_after_first_token(run)
    assert type(error) is RankError
    assert (error.rank, error.step, error.traceback_text) == (1, 2, "Traceback of rank 1")
    assert "rank 1 of 3 failed at step 2: ValueError: rank 1 says why" in str(error)


@pytest.mark.parametrize("kind", [ModelError, ConfigError])
def test_what_a_user_can_mend_keeps_its_class(make_run, kind):
    run = make_run()
    run.launch()
    for rank in run.ranks:
        rank.say(rank.hello())
    for rank in run.ranks:
        rank.hear()
    run.ranks[2].say(run.ranks[2].failure(kind.__name__, step=-1))
    error = last_error(run)
    assert type(error) is kind
    assert "rank 2 of 3 failed while it started" in str(error)


def test_a_failure_while_idle_is_told_at_once(make_run):
    run = make_run()
    run.start()
    run.ranks[0].say(run.ranks[0].failure(step=-1))
    error = last_error(run)
    assert type(error) is RankError
    assert error.rank == 0


def test_a_failure_outlives_the_process_that_told_it(make_run):
    """The last word of a rank that has left is its Failure, not its exit code."""
    run = make_run("polite", "confessed", "polite")
    run.start()
    run.first_step()
    rank = run.ranks[1]
    rank.hear_plan()
    rank.say(rank.failure())
    rank.child.tell_to_leave()
    error = error_after_first_token(run)
    assert type(error) is RankError
    assert error.rank == 1


# Causes behind a broken exchange


@pytest.mark.parametrize("death", ["before", "after"])
def test_a_death_is_the_cause_of_a_broken_exchange(run, death):
    """Rank 2 is killed, rank 0 tells of an exchange that broke: whichever is seen first."""
    kill = run.children[2].send_signal
    if death == "before":
        kill(signal.SIGKILL)
        run.children[2].wait(60.0)
    run.ranks[0].say(run.ranks[0].failure("TransportError", transport=True))
    if death == "after":
        threading.Timer(0.2, kill, [signal.SIGKILL]).start()
    error = error_after_first_token(run)
    assert type(error) is RankLost
    assert (error.role, error.exit_status) == ("rank 2", -signal.SIGKILL)
    assert "step 2" in str(error)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_failure_behind_a_broken_exchange_is_its_cause(make_run, order):
    """Rank 1 fails, tells it, and leaves; rank 0 tells of the exchange that this broke: whichever is heard first."""
    run = make_run("polite", "confessed", "polite")
    run.start()
    run.first_step()
    for rank in run.ranks:
        rank.hear_plan()
    told = {0: run.ranks[0].failure("TransportError", transport=True), 1: run.ranks[1].failure()}
    for index in order:
        run.ranks[index].say(told[index])
    run.children[1].tell_to_leave()
    error = error_after_first_token(run)
    assert type(error) is RankError
    assert (error.rank, error.traceback_text) == (1, "Traceback of rank 1")


def test_a_death_outranks_all_broken_exchanges(run):
    """All survivors tell, and leave as those do who have told."""
    for rank in run.ranks[:2]:
        rank.say(rank.failure("DeadlineExceeded", transport=True))
    threading.Timer(0.2, run.children[2].send_signal, [signal.SIGKILL]).start()
    error = error_after_first_token(run)
    assert type(error) is RankLost
    assert error.role == "rank 2"


def test_a_broken_exchange_without_a_cause_is_told_as_it_is(make_run, monkeypatch):
    monkeypatch.setattr(gang_module, "CAUSE_TIMEOUT_S", 0.2)
    run = make_run()
    run.start()
    run.first_step()
    run.ranks[1].hear_plan()
    run.ranks[1].say(run.ranks[1].failure("TransportError", transport=True))
    error = error_after_first_token(run)
    assert type(error) is RankError
    assert (error.rank, error.step) == (1, 2)
    assert "TransportError" in str(error)


# Deaths and deadlines


@pytest.mark.parametrize("others_answer", [True, False])
def test_a_rank_that_dies_in_a_step_is_named(run, others_answer):
    if others_answer:
        answer(run, 1)
    run.children[1].send_signal(signal.SIGKILL)
    error = error_after_first_token(run)
    assert type(error) is RankLost
    assert (error.role, error.exit_status) == ("rank 1", -signal.SIGKILL)


def test_a_rank_that_dies_while_idle_is_named(make_run):
    run = make_run()
    run.start()
    run.children[2].send_signal(signal.SIGKILL)
    error = last_error(run)
    assert type(error) is RankLost
    assert error.role == "rank 2"


def test_a_rank_that_dies_at_its_start_is_named(make_run):
    run = make_run("polite", "fails", "polite")
    run.launch()
    run.ranks[0].say(run.ranks[0].hello())
    error = last_error(run)
    assert type(error) is RankLost
    assert (error.role, error.exit_status) == ("rank 1", 3)
    assert "exit code 3" in str(error)
    assert "before the first step" in str(error)


def test_a_rank_that_is_silent_past_the_deadline_is_named(make_run):
    run = make_run()
    run.settings = replace(run.settings, step_timeout_s=0.5)
    run.start()
    run.submit()
    for rank in run.ranks:
        plan = rank.hear_plan()
        if rank.rank != 1:
            rank.say(rank.result(plan))
    error = last_error(run)
    assert run.said[:-1] == []
    assert type(error) is DeadlineExceeded
    assert (error.what, error.timeout_s) == ("step 1", 0.5)
    assert "rank 1" in str(error)
    assert "rank 0" not in str(error)
    assert "rank 2" not in str(error)


def test_the_end_of_the_pool_ends_the_run_in_the_middle_of_a_step(run):
    answer(run, 1)
    run.close_pool()
    assert run.outcome() == [FIRST_TOKEN]
    assert all_gone(child.pid for child in run.children)
    assert not run.folder.path.exists()


# Ranks that are not alike


def test_an_interpreter_of_another_version_is_refused(make_run):
    run = make_run()
    run.launch()
    for rank in run.ranks:
        rank.say(rank.hello(protocol=2 if rank.rank == 1 else 1))
    error = last_error(run)
    assert type(error) is ProtocolError
    assert "rank 1" in str(error)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("model digest", {"model_digest": "6" * 64}),
        ("settings digest", {"settings_digest": "6" * 64}),
        ("exchange", {"exchange": "slots"}),
        ("versions", {"versions": {"torch": "3"}}),
    ],
)
def test_ranks_that_are_not_alike_never_get_a_plan(make_run, name, changes):
    run = make_run()
    run.launch()
    run.submit()
    for rank in run.ranks:
        rank.say(rank.hello())
    for rank in run.ranks:
        rank.hear()
        rank.say(rank.ready(**changes) if rank.rank == 1 else rank.ready())
    error = last_error(run)
    assert type(error) is RankMismatch
    assert (error.rank, error.step) == (1, -1)
    assert name in str(error)
    assert run.said[:-1] == []
    assert not run.ranks[0].socket.poll(0)


@pytest.mark.parametrize("changes", [{"model_digest": "6" * 64}, {"settings_digest": "6" * 64}])
def test_ranks_that_are_alike_but_not_what_the_pool_asked_for_are_refused(make_run, changes):
    run = make_run()
    run.launch()
    for rank in run.ranks:
        rank.say(rank.hello())
    for rank in run.ranks:
        rank.hear()
        rank.say(rank.ready(**changes))
    error = last_error(run)
    assert type(error) is RankMismatch
