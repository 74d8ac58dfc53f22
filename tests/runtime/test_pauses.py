"""A lost gang that is started again is a pause to every call, and an event. The coordinator is played by the test."""

import asyncio
import logging
import threading
import time

import msgspec
import pytest
from leafsum.errors import DeadlineExceeded
from leafsum.runtime import conversation as conversation_module
from leafsum.runtime.messages import GangLost, GangRecovered
from leafsum.runtime.recoveries import Recovery
from processes import wait_until
from runtime.fake_coordinator import Caller, answer, ask, finished

CAUSE = 'rank 1 of 2 (pid 5) is gone at step 7: signal SIGKILL, "late"\n'
LOST = GangLost(number=1, cause=CAUSE, rank=1, step=7, num_open=3, timeout_s=60.0)
RECOVERED = GangRecovered(number=1, num_ranks=2, pids=(11, 12), seconds=0.25)


def test_both_are_lines_of_the_log(coordinator, caplog):
    with caplog.at_level(logging.WARNING, "leafsum.pool"):
        coordinator.say(LOST, RECOVERED, msgspec.structs.replace(LOST, number=2, rank=-1, step=-1, cause="late"))
        wait_until(lambda: len(caplog.records) == 3, "three events")
    run = f"run={coordinator.conversation.run_folder.run_id}"
    cause = r'"rank 1 of 2 (pid 5) is gone at step 7: signal SIGKILL, \"late\"\n"'
    assert [record.getMessage() for record in caplog.records] == [
        f"{run} rank=1 step=7 event=gang-lost number=1 num_open=3 cause={cause}",
        f"{run} event=gang-recovered number=1 seconds=0.250 tp=2 pids=11,12",
        f"{run} event=gang-lost number=2 num_open=3 cause=late",
    ]
    assert {(record.name, record.levelno) for record in caplog.records} == {("leafsum.pool", logging.WARNING)}


def test_the_pool_tells_of_each_also_after_its_end(coordinator):
    assert coordinator.conversation.recoveries == ()
    coordinator.say(LOST)
    lost = Recovery(number=1, cause=CAUSE, rank=1, step=7)
    wait_until(lambda: coordinator.conversation.recoveries == (lost,), "the loss")
    coordinator.say(RECOVERED)
    recovered = Recovery(1, CAUSE, 1, 7, num_ranks=2, pids=(11, 12), seconds=0.25)
    wait_until(lambda: coordinator.conversation.recoveries == (recovered,), "the recovery")
    for number in range(2, 67):
        coordinator.say(msgspec.structs.replace(LOST, number=number))
    coordinator.say(finished(0, 0))
    wait_until(lambda: coordinator.conversation.recoveries[-1].number == 66, "all of them")
    coordinator.conversation.close()
    assert [each.number for each in coordinator.conversation.recoveries] == list(range(3, 67)), "the newest 64"


@pytest.mark.parametrize("how", ["result", "aresult", "ask"])
def test_a_call_waits_longer_while_a_gang_is_started(how, coordinator, monkeypatch):
    """And no longer than that; when it is ready, the usual limit holds again."""
    monkeypatch.setattr(conversation_module, "GRACE_S", 0.0)
    stream = coordinator.stream(timeout_s=0.3)
    coordinator.hear()
    caller = {
        "result": lambda: Caller(stream.result),
        "aresult": lambda: Caller(lambda: asyncio.run(stream.aresult())),
        "ask": lambda: Caller(lambda: coordinator.conversation.ask(ask, 0.3)),
    }[how]()
    if how == "ask":
        coordinator.hear()
    coordinator.say(LOST)
    time.sleep(1.0)
    coordinator.say(RECOVERED)
    assert caller.is_alive()
    coordinator.say(answer(0), msgspec.structs.replace(finished(0, 0), num_recoveries=1, num_ranks=2))
    outcome = caller.outcome()
    if how != "ask":
        assert [(each.recoveries, each.tp) for each in outcome] == [(1, 2)]
        assert outcome[0].to_dict()["recoveries"] == 1
    late = Caller(coordinator.stream(timeout_s=0.3).result).outcome()
    assert (type(late), late.timeout_s) == (DeadlineExceeded, 0.3)


def test_a_gang_that_does_not_come_back_in_time_is_the_coordinators_silence(coordinator, monkeypatch):
    monkeypatch.setattr(conversation_module, "GRACE_S", 0.0)
    caller = Caller(coordinator.stream(timeout_s=0.2).result)
    coordinator.say(msgspec.structs.replace(LOST, timeout_s=0.3))
    late = caller.outcome()
    assert (type(late), late.what, late.timeout_s) == (DeadlineExceeded, "coordinator", 0.5)


class Handler(logging.Handler):
    """A program's own, which does what no handler should."""

    def __init__(self, deed) -> None:
        super().__init__()
        self.deed = deed
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())
        self.deed()


@pytest.mark.parametrize("deed", ["raises", "blocks", "calls the pool"])
def test_a_log_handler_of_the_program_holds_up_no_caller(deed, coordinator, monkeypatch):
    told, unblock = [], threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda raised: told.append(raised.exc_type))

    def raise_something() -> None:
        raise KeyboardInterrupt

    deeds = {
        "raises": raise_something,
        "blocks": lambda: unblock.wait(60.0),
        "calls the pool": lambda: coordinator.conversation.ask(ask, 60.0),
    }
    handler = Handler(deeds[deed])
    monkeypatch.setattr(logging.getLogger("leafsum.pool"), "handlers", [handler])
    caller = Caller(coordinator.stream().result)
    coordinator.hear()
    coordinator.say(LOST, RECOVERED, finished(0, 0))
    assert [each.finish_reason for each in caller.outcome()] == ["length"]
    wait_until(lambda: handler.seen, "the event")
    unblock.set()
    if deed == "calls the pool":
        coordinator.say(answer(0), answer(1))
    wait_until(lambda: len(handler.seen) == 2, "both events, in their order")
    assert ["event=gang-lost" in line for line in handler.seen] == [True, False]
    if deed == "raises":
        wait_until(lambda: told == [KeyboardInterrupt] * 2, "what was raised ends its own thread, and nothing else")


def test_a_program_that_was_stopped_itself_waits_anew(coordinator, monkeypatch):
    """As in a container that is paused: nobody was silent while there was nobody to hear."""
    now_s = [1000.0]
    monkeypatch.setattr(conversation_module.time, "monotonic", lambda: now_s[0])
    conversation = coordinator.conversation
    conversation.require_open()[1].last_heard_s = now_s[0]
    patience = conversation._patience(10.0)
    limit_s = 10.0 + conversation_module.GRACE_S
    assert patience.left_s() == limit_s
    now_s[0] += limit_s + 500.0
    assert patience.left_s() == limit_s, "anew"
    assert conversation.require_open()[1]._hang_up is None
    now_s[0] += limit_s + 0.5
    assert conversation.require_open()[1].end is None
    patience.left_s()
    wait_until(lambda: conversation.require_open()[1].end is not None, "the end, for real silence")
