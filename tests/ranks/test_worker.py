"""A real rank process, driven over its socket: what it says, and how it leaves."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from leafsum.ranks.control import open_socket, rank_identity
from leafsum.ranks.messages import (
    FROM_RANK,
    LEFT_WITH_FAILURE,
    PROTOCOL_VERSION,
    Admit,
    Failure,
    FromRank,
    Hello,
    Message,
    Plan,
    Ready,
    Run,
    Setup,
    StepResult,
    decode,
    encode,
)
from leafsum.runtime.child import Child, end_children
from leafsum.runtime.run_folder import RunFolder
from leafsum.runtime.settings import Settings
from msgspec.structs import replace
from processes import wait_until
from setups import RUN_ID, make_setup
from tiny_checkpoints import write_checkpoint

TESTS = Path(__file__).resolve().parent.parent
WAIT_S = 60.0


class Rank:
    """Rank 0: its process, and the coordinator's end of its socket."""

    def __init__(self, folder: RunFolder, module: str = "leafsum.ranks.worker", parent_pid: int = 0) -> None:
        self.context: zmq.Context = zmq.Context()
        self.socket = open_socket(self.context, zmq.ROUTER, folder.ranks_socket, bind=True)
        self.identity = rank_identity(RUN_ID, 0)
        arguments = ["--run-folder", str(folder.path), "--run-id", RUN_ID, "--rank", "0", "--tp", "1"]
        arguments += ["--parent-pid", str(parent_pid or os.getpid())]
        self.child = Child("rank 0", module, arguments, env={**os.environ, "PYTHONPATH": search_path()})

    def say(self, message: Message) -> None:
        self.say_bytes(encode(message))

    def say_bytes(self, frame: bytes) -> None:
        self.socket.send_multipart([self.identity, frame])

    def hear(self) -> FromRank:
        assert self.socket.poll(WAIT_S * 1000), "the rank is silent"
        identity, frame = self.socket.recv_multipart()
        assert identity == self.identity
        return decode(frame, FROM_RANK)

    def hear_failure(self) -> Failure:
        """The rank's last word: after it the process leaves, and says nothing more."""
        failure = self.hear()
        assert isinstance(failure, Failure)
        assert self.child.wait(WAIT_S) == LEFT_WITH_FAILURE
        assert not self.socket.poll(0)
        return failure

    def close(self) -> None:
        end_children([self.child], 0.0)
        self.context.destroy(linger=0)


def search_path() -> str:
    return os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])


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
    hasty = start(module="hasty_worker")
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


def test_a_plan_that_does_not_follow_is_a_failure_of_its_step(rank, setup):
    rank.say(setup)
    assert isinstance(rank.hear(), Ready)
    rank.say(plan(1))
    assert isinstance(rank.hear(), StepResult)
    rank.say(plan(3))
    failure = rank.hear_failure()
    assert (failure.step, failure.kind, failure.transport) == (3, "ProtocolError", False)
    assert "expected step 2" in failure.text


def test_a_model_that_cannot_be_read_is_a_failure_with_its_class(rank, setup, tmp_path):
    rank.say(replace(setup, model_dir=str(tmp_path)))
    failure = rank.hear_failure()
    assert (failure.step, failure.kind, failure.transport) == (-1, "ModelError", False)
    assert str(tmp_path) in failure.text


def test_a_rank_that_waits_for_its_peers_still_leaves_at_once(rank, model_dir, folder):
    """Rank 1 of 2 never comes. The meeting would wait for it for an hour; the death pipe is heard all the same."""
    patience = {"tp": 2, "start_timeout_s": 3600.0, "step_timeout_s": 3600.0}
    rank.say(make_setup(model_dir, folder.path, kv_tokens=64, **patience))
    wait_until(folder.store.exists, "the rank is at the meeting")
    rank.child.tell_to_leave()
    assert rank.child.wait(WAIT_S) == 0
    assert not rank.socket.poll(0)
