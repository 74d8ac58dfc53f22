"""A real rank process, driven over its socket: what it says, and how it leaves."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from leafsum.ranks.machine import cpu_name
from leafsum.ranks.messages import (
    LEFT_UNHEARD,
    MAX_MESSAGE_BYTES,
    MAX_TEXT_CHARACTERS,
    PROTOCOL_VERSION,
    Admit,
    Hello,
    Plan,
    Ready,
    Run,
    Setup,
    StepResult,
    encode,
)
from leafsum.runtime.run_folder import RunFolder
from leafsum.runtime.settings import Settings
from msgspec.structs import replace
from processes import wait_until
from rank_process import WAIT_S, Rank
from setups import RUN_ID, make_setup
from tiny_checkpoints import write_checkpoint


@pytest.fixture
def folder(tmp_path_factory) -> RunFolder:
    return RunFolder(tmp_path_factory.mktemp("run"), RUN_ID)


@pytest.fixture
def start(folder):
    """Starts the one rank of a test."""
    ranks = []

    def start_rank(**fields) -> Rank:
        ranks.append(Rank(folder, **fields))
        return ranks[-1]

    yield start_rank
    for rank in ranks:
        rank.close()


@pytest.fixture
def rank(start) -> Rank:
    """It has said Hello."""
    rank = start()
    assert rank.hear() == Hello(protocol=PROTOCOL_VERSION, run_id=RUN_ID, rank=0, pid=rank.child.pid)
    return rank


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def setup(model_dir, folder) -> Setup:
    return make_setup(model_dir, folder.path, kv_tokens=64, page_size=16, concurrency=2)


def plan(step: int) -> Plan:
    """The first one opens a slot and draws a token, the others draw one more."""
    admits = (Admit(slot=0, page_ids=(1, 0)),) if step == 1 else ()
    token_ids = (5, 6, 7) if step == 1 else ()
    start = 0 if step == 1 else step + 1
    return Plan(
        step=step, releases=(), admits=admits, runs=(Run(slot=0, start=start, token_ids=token_ids, decides=True),)
    )


# Before its Setup; torch is not loaded


def test_a_rank_leaves_when_its_death_pipe_closes(rank):
    rank.child.tell_to_leave()
    assert rank.child.wait(WAIT_S) == 0
    assert not rank.socket.poll(0)


def test_a_rank_without_its_parent_leaves_before_its_first_word(start):
    orphan = start(parent_pid=os.getpid() + 1)
    assert orphan.child.wait(WAIT_S) == 1
    assert not orphan.socket.poll(0)


def test_a_rank_that_gets_no_setup_says_so_and_leaves(start):
    hasty = start(module="timed_worker", SETUP_TIMEOUT_S="0.2")
    assert isinstance(hasty.hear(), Hello)
    failure = hasty.hear_failure()
    assert (failure.rank, failure.step, failure.kind) == (0, -1, "DeadlineExceeded")
    assert "no Setup within 0.2 s" in failure.text


FIRST_WORDS: dict[str, tuple[Callable[[], bytes], int]] = {
    "garbage": (lambda: b"\xc1\x00", -1),
    "nothing": (lambda: b"", -1),
    "a word that only ranks say": (lambda: encode(Hello(protocol=1, run_id=RUN_ID, rank=0, pid=1)), -1),
    "a plan before Setup": (lambda: encode(plan(1)), 1),
}


@pytest.mark.parametrize("name", FIRST_WORDS)
def test_a_first_word_that_is_no_setup_is_a_failure(rank, name):
    frame, step = FIRST_WORDS[name]
    rank.say_bytes(frame())
    failure = rank.hear_failure()
    assert (failure.rank, failure.step, failure.kind, failure.transport) == (0, step, "ProtocolError", False)
    assert "ProtocolError" in failure.traceback_text


def test_a_plan_while_the_model_is_loading_is_a_failure(rank, setup):
    rank.say(setup)
    rank.say(plan(1))
    failure = rank.hear_failure()
    assert (failure.step, failure.kind) == (-1, "ProtocolError")
    assert "Plan" in failure.text


AWKWARD = {
    "exit": ("SystemExit", "3"),
    "speechless": ("SpeechlessError", "SpeechlessError, which cannot say why"),
    "no characters": ("ModelError", "model-\\udcff.safetensors"),
    "endless": ("ModelError", "x" * MAX_TEXT_CHARACTERS),
}


@pytest.mark.parametrize("name", AWKWARD)
def test_an_error_that_is_hard_to_tell_is_told(start, setup, name):
    rank = start(module="failing_worker", FAILS=name)
    assert isinstance(rank.hear(), Hello)
    rank.say(setup)
    failure = rank.hear_failure()
    assert (failure.kind, failure.text) == AWKWARD[name]


def test_a_word_in_two_frames_is_a_failure(rank):
    rank.socket.send_multipart([rank.identity, encode(plan(1)), b""])
    assert "expected one frame of the coordinator, got 2" in rank.hear_failure().text


def close_the_socket(rank: Rank) -> None:
    rank.socket.close(linger=0)


def say_too_much(rank: Rank) -> None:
    rank.say_bytes(bytes(MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize("break_it", [close_the_socket, say_too_much])
def test_a_rank_whose_control_socket_breaks_ends_and_says_why(rank, break_it):
    break_it(rank)
    assert rank.child.wait(WAIT_S) == LEFT_UNHEARD
    assert rank.log_lines()[-1].endswith('event=unheard text="the connection to the coordinator broke"')


def test_a_socket_that_breaks_as_the_coordinator_ends_is_no_error(start):
    """The kernel closes a dead coordinator's descriptors one by one."""
    rank = start(module="timed_worker", END_TIMEOUT_S="60")
    assert isinstance(rank.hear(), Hello)
    close_the_socket(rank)
    assert rank.child.wait(0.3) is None
    rank.child.tell_to_leave()
    assert rank.child.wait(WAIT_S) == 0
    assert rank.log_lines()[-1].endswith("event=leaving")


# With a model


@pytest.mark.parametrize(("field", "value"), [("rank", 1), ("protocol", PROTOCOL_VERSION + 1)])
def test_a_setup_for_someone_else_is_a_failure(rank, setup, field, value):
    rank.say(replace(setup, **{field: value}))
    failure = rank.hear_failure()
    assert (failure.step, failure.kind) == (-1, "ProtocolError")
    assert str(value) in failure.text


def test_a_second_setup_is_a_failure(rank, setup):
    """On the way there: Ready tells what the rank is, and each plan is answered with its own number."""
    rank.say(setup)
    ready = rank.hear()
    assert isinstance(ready, Ready)
    assert (ready.rank, ready.settings_digest) == (0, Settings().digest())
    assert (ready.device, ready.versions["leafsum"]) == (f"cpu: {cpu_name()}", version("leafsum"))
    for step in (1, 2):
        rank.say(plan(step))
        result = rank.hear()
        assert isinstance(result, StepResult)
        assert (result.rank, result.step) == (0, step)
        assert 0 <= result.runs[0].token_id < 101
    rank.say(setup)
    failure = rank.hear_failure()
    assert (failure.step, failure.kind) == (2, "ProtocolError")
    assert "one Setup" in failure.text


START_EVENTS = ("started", "hello", "setup", "loading", "meeting", "met", "ready")


def test_a_plan_that_does_not_follow_is_a_failure_of_its_step(rank, setup):
    """It comes with all that the rank did, in order; the log has the same."""
    rank.say(setup)
    assert isinstance(rank.hear(), Ready)
    rank.say(plan(1))
    assert isinstance(rank.hear(), StepResult)
    rank.say(plan(3))
    failure = rank.hear_failure()
    assert (failure.step, failure.kind, failure.transport) == (3, "ProtocolError", False)
    assert "expected step 2" in failure.text
    *begun, planned, done, last, failed = failure.events
    assert tuple(event.name for event in begun) == START_EVENTS
    assert (planned.name, planned.step, planned.facts) == ("plan", 1, "rows=3 runs=1 slots=0")
    assert (done.name, done.step) == ("done", 1)
    assert (last.name, last.step, last.facts) == ("plan", 3, "rows=1 runs=1 slots=0")
    assert (failed.name, failed.step) == ("failed", 3)
    assert "expected step 2" in failed.facts
    assert [event.at_s for event in failure.events] == sorted(event.at_s for event in failure.events)
    told = [LOG_LINE.fullmatch(line) for line in rank.log_lines()]
    assert [(line["event"], line["step"]) for line in told if line] == [
        (event.name, str(event.step) if event.step >= 0 else None) for event in failure.events
    ]
    assert all(told)


LOG_LINE = re.compile(
    rf"""\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{{3}}[+-]\d\d:\d\d\ (debug|info|warning|error)
    \ run={RUN_ID}\ rank=0(\ step=(?P<step>\d+))?\ event=(?P<event>\w+)
    (\ \w+=([^\s"=]+|"([^"\\]|\\.)*"))*""",
    re.VERBOSE,
)
"""What every line of standard error is, at every level."""


def test_a_rank_of_a_later_gang_counts_steps_from_where_the_lost_one_was(rank, setup):
    rank.say(replace(setup, previous_step=41))
    assert isinstance(rank.hear(), Ready)
    rank.say(replace(plan(1), step=42))
    result = rank.hear()
    assert isinstance(result, StepResult)
    assert result.step == 42
    rank.say(replace(plan(2), step=2))
    assert "expected step 43" in rank.hear_failure().text


def test_a_model_that_cannot_be_read_is_a_failure_with_its_class(rank, setup, tmp_path):
    rank.say(replace(setup, model_dir=str(tmp_path)))
    failure = rank.hear_failure()
    assert (failure.step, failure.kind, failure.transport) == (-1, "ModelError", False)
    assert str(tmp_path) in failure.text


def test_a_rank_that_waits_for_its_peers_still_leaves_at_once(rank, model_dir, folder):
    """Rank 1 of 2 never comes. The meeting would wait for it for an hour; the death pipe is heard all the same."""
    patience = {"tp": 2, "start_timeout_s": 3600.0, "step_timeout_s": 3600.0}
    rank.say(make_setup(model_dir, folder.path, kv_tokens=64, **patience))
    wait_until(folder.store(0).exists, "the rank is at the meeting")
    rank.child.tell_to_leave()
    assert rank.child.wait(WAIT_S) == 0
    assert not rank.socket.poll(0)
