"""Ranks that fail, die, fall silent or are not alike: the run ends with the cause, whatever else was reported first."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import replace

import pytest
from leafsum.errors import ConfigError, DeadlineExceeded, ModelError, ProtocolError, RankError, RankLost, RankMismatch
from leafsum.ranks.control import AWAY_S
from leafsum.ranks.messages import PROTOCOL_VERSION
from leafsum.runtime import gang as gang_module
from processes import all_gone, wait_until
from runtime.fake_run import FIRST_TOKEN, FakeRank


def test_a_coordinator_that_was_stopped_itself_waits_anew(make_run, monkeypatch):
    """As in a container that is paused: the deadline has passed for everybody, and nobody was late."""
    real_poll, slept = gang_module.poll, []

    def poll(poller, timeout_s):
        if timeout_s is not None and timeout_s < 2.0 and not slept:
            slept.append(timeout_s)
            time.sleep(timeout_s + AWAY_S + 0.5)
            return set()
        return real_poll(poller, timeout_s)

    run = make_run(step_timeout_s=1.5)
    run.start()
    monkeypatch.setattr(gang_module, "poll", poll)
    run.submit()
    plans = [rank.hear_plan() for rank in run.ranks]
    wait_until(lambda: slept, "the step's wait")
    for rank, plan in zip(run.ranks, plans, strict=True):
        rank.say(rank.result(plan))
    assert run.hear() == FIRST_TOKEN


# Failures


@pytest.mark.parametrize("others_answer", [True, False])
def test_a_failure_comes_back_with_rank_step_and_traceback(run, others_answer):
    if others_answer:
        run.answer(1)
    run.ranks[1].say(run.ranks[1].failure())
    error = run.error(after=[FIRST_TOKEN])
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
    error = run.error(after=[])
    assert type(error) is kind
    assert "rank 2 of 3 failed while it started" in str(error)


def test_a_failure_while_idle_is_told_at_once(make_run):
    run = make_run()
    run.start()
    run.ranks[0].say(run.ranks[0].failure(step=-1))
    error = run.error(after=[])
    assert type(error) is RankError
    assert error.rank == 0


def test_a_failure_outlives_the_process_that_told_it(make_run):
    """The last word of a rank that has left is its Failure, not its exit code."""
    run = make_run("polite", "confessed", "polite")
    run.second_step()
    rank = run.ranks[1]
    rank.say(rank.failure())
    rank.child.tell_to_leave()
    error = run.error(after=[FIRST_TOKEN])
    assert type(error) is RankError
    assert error.rank == 1


def test_the_last_word_of_a_rank_may_come_after_its_death_is_seen(make_run, monkeypatch):
    monkeypatch.setattr(gang_module, "LAST_WORDS_MS", 60_000)
    run = make_run("polite", "confessed", "polite")
    run.second_step()
    rank = run.ranks[1]
    leave_and_speak_later(rank)
    error = run.error(after=[FIRST_TOKEN])
    assert type(error) is RankError
    assert error.rank == 1


def leave_and_speak_later(rank: FakeRank) -> None:
    rank.child.tell_to_leave()
    rank.child.wait(60.0)
    threading.Timer(0.3, rank.say, [rank.failure()]).start()


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
    error = run.error(after=[FIRST_TOKEN])
    assert type(error) is RankLost
    assert (error.role, error.exit_status) == ("rank 2", -signal.SIGKILL)
    assert "step 2" in str(error)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_failure_behind_a_broken_exchange_is_its_cause(make_run, order):
    """Rank 1 fails, tells it, and leaves; rank 0 tells of the exchange that this broke: whichever is heard first."""
    run = make_run("polite", "confessed", "polite")
    run.second_step()
    told = {0: run.ranks[0].failure("TransportError", transport=True), 1: run.ranks[1].failure()}
    for index in order:
        run.ranks[index].say(told[index])
    run.children[1].tell_to_leave()
    error = run.error(after=[FIRST_TOKEN])
    assert type(error) is RankError
    assert (error.rank, error.traceback_text) == (1, "Traceback of rank 1")


def test_a_rank_that_left_with_its_failure_told_is_no_death(make_run):
    """Its exit code says that it has told, though nobody has heard it yet."""
    run = make_run("polite", "confessed", "polite")
    run.second_step()
    rank = run.ranks[1]
    run.ranks[0].say(run.ranks[0].failure("TransportError", transport=True))
    leave_and_speak_later(rank)
    error = run.error(after=[FIRST_TOKEN])
    assert type(error) is RankError
    assert error.rank == 1


def test_a_death_outranks_all_broken_exchanges(run):
    """Every survivor has told when it comes."""
    for rank in run.ranks[:2]:
        rank.say(rank.failure("DeadlineExceeded", transport=True))
    threading.Timer(0.2, run.children[2].send_signal, [signal.SIGKILL]).start()
    error = run.error(after=[FIRST_TOKEN])
    assert type(error) is RankLost
    assert error.role == "rank 2"


def test_a_broken_exchange_without_a_cause_is_told_as_it_is(make_run, monkeypatch):
    monkeypatch.setattr(gang_module, "CAUSE_TIMEOUT_S", 0.2)
    run = make_run()
    run.second_step()
    run.ranks[1].say(run.ranks[1].failure("TransportError", transport=True))
    error = run.error(after=[FIRST_TOKEN])
    assert type(error) is RankError
    assert (error.rank, error.step) == (1, 2)
    assert "TransportError" in str(error)


# Deaths and deadlines


@pytest.mark.parametrize("others_answer", [True, False])
def test_a_rank_that_dies_in_a_step_is_named(run, others_answer):
    if others_answer:
        run.answer(1)
    run.children[1].send_signal(signal.SIGKILL)
    error = run.error(after=[FIRST_TOKEN])
    assert type(error) is RankLost
    assert (error.role, error.exit_status) == ("rank 1", -signal.SIGKILL)


def test_a_rank_that_dies_while_idle_is_named(make_run):
    run = make_run()
    run.start()
    run.children[2].send_signal(signal.SIGKILL)
    error = run.error(after=[])
    assert type(error) is RankLost
    assert error.role == "rank 2"


def test_a_rank_that_dies_at_its_start_is_named(make_run):
    run = make_run("polite", "fails", "polite")
    run.launch()
    run.ranks[0].say(run.ranks[0].hello())
    error = run.error(after=[])
    assert type(error) is RankLost
    assert (error.role, error.exit_status) == ("rank 1", 3)
    assert "exit code 3" in str(error)
    assert "before its first step" in str(error)


def test_a_rank_that_is_silent_past_the_deadline_is_named(make_run):
    run = make_run()
    run.settings = replace(run.settings, step_timeout_s=2.0)
    run.start()
    run.submit()
    for rank in run.ranks:
        plan = rank.hear_plan()
        if rank.rank != 1:
            rank.say(rank.result(plan))
    error = run.error(after=[])
    assert type(error) is DeadlineExceeded
    assert (error.what, error.timeout_s) == ("step 1", 2.0)
    assert "rank 1" in str(error)
    assert "rank 0" not in str(error)
    assert "rank 2" not in str(error)


def test_the_end_of_the_pool_ends_the_run_in_the_middle_of_a_step(run):
    run.answer(1)
    run.close_pool()
    assert run.outcome() == [FIRST_TOKEN]
    assert all_gone(child.pid for child in run.children)
    assert not run.folder.path.exists()


# Ranks that are not alike


def test_an_interpreter_of_another_version_is_refused(make_run):
    run = make_run()
    run.launch()
    for rank in run.ranks:
        rank.say(rank.hello(protocol=PROTOCOL_VERSION + (rank.rank == 1)))
    error = run.error(after=[])
    assert type(error) is ProtocolError
    assert "rank 1" in str(error)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("model digest", {"model_digest": "6" * 64}),
        ("settings digest", {"settings_digest": "6" * 64}),
        ("exchange", {"exchange": "slots"}),
        ("transport", {"transport": "gloo"}),
        ("number of threads", {"num_threads": 2}),
        ("poison", {"poison": True}),
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
    error = run.error(after=[])
    assert type(error) is RankMismatch
    assert (error.rank, error.step) == (1, -1)
    assert name in str(error)
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
    error = run.error(after=[])
    assert type(error) is RankMismatch
