"""Whatever ends the line to the coordinator reaches every call, with the same words. The test plays the coordinator."""

import gc
import os
import signal
import time
from typing import Any

import pytest
import zmq
from leafsum.errors import DeadlineExceeded, PoolClosed, ProtocolError, RankError, RankLost
from leafsum.runtime import conversation as conversation_module
from leafsum.runtime import line as line_module
from leafsum.runtime.messages import Fatal
from processes import all_gone, state_of, wait_until
from runtime.fake_coordinator import WAIT_S, Caller, FakeCoordinator, ask

FATAL = Fatal(kind="RankError", text="rank 1 says why", rank=1, step=3)


def open_calls(coordinator: FakeCoordinator) -> list[Caller]:
    """Two streams and a question, under way and waiting, and a stream that nobody reads."""
    streams = [coordinator.stream() for _ in range(3)]
    callers = [Caller(stream.result) for stream in streams[:2]]
    callers.append(Caller(lambda: coordinator.conversation.ask(ask, WAIT_S)))
    for _ in range(4):
        coordinator.hear()
    coordinator.unread = streams[2]
    return callers


def outcomes(coordinator: FakeCoordinator, callers: list[Caller]) -> list[Any]:
    """And what the unread stream raises when it is read, long after the pool was closed."""
    found = [caller.outcome() for caller in callers]
    assert all_gone([coordinator.child.pid])
    assert not coordinator.conversation.run_folder.path.exists()
    return [*found, Caller(coordinator.unread.result).outcome()]


def test_a_fatal_error_reaches_every_call(coordinator):
    callers = open_calls(coordinator)
    coordinator.say(FATAL)
    errors = outcomes(coordinator, callers)
    assert [(type(error), str(error), error.rank, error.step) for error in errors] == [
        (RankError, "rank 1 says why", 1, 3)
    ] * 4
    assert len(set(map(id, errors))) == 4, "each call has an error of its own"
    with pytest.raises(PoolClosed, match="this pool is closed; make a new one"):
        coordinator.stream()


def test_a_fatal_error_is_told_to_a_call_that_comes_after_it(coordinator):
    coordinator.say(FATAL)
    wait_until(lambda: coordinator.conversation._line.end is not None, "the end of the line")
    with pytest.raises(RankError, match="rank 1 says why"):
        next(coordinator.stream())


def test_the_coordinators_death_reaches_every_call_after_its_last_words(coordinator):
    callers = open_calls(coordinator)
    coordinator.say_text(2, "a")
    os.kill(coordinator.child.pid, signal.SIGKILL)
    errors = outcomes(coordinator, callers)
    text = f"the coordinator (pid {coordinator.child.pid}) is gone: signal SIGKILL; its ranks ended with it"
    assert [(type(error), str(error), error.role, error.exit_status) for error in errors] == [
        (RankLost, text, "coordinator", -signal.SIGKILL)
    ] * 4
    assert coordinator.unread._requests[2].output == [ord("a")]


def test_a_connection_that_breaks_reaches_every_call_after_what_came_before(coordinator, monkeypatch):
    """The coordinator's process lives. ZeroMQ would connect again, and words that were on their way would be lost."""
    monkeypatch.setattr(line_module, "END_TIMEOUT_S", 0.1)
    callers = open_calls(coordinator)
    coordinator.say_text(2, "a")
    wait_until(lambda: not coordinator.unread._inbox.empty(), "the last word")
    coordinator.break_connection()
    errors = outcomes(coordinator, callers)
    assert [type(error) for error in errors] == [ProtocolError] * 4
    assert f"the connection to the coordinator (pid {coordinator.child.pid}) broke" in str(errors[0])
    assert coordinator.unread._requests[2].output == [ord("a")]


def test_last_words_are_looked_for_after_a_death(coordinator, monkeypatch):
    """A death can be seen before them: here they are never seen otherwise."""
    poll = line_module.poll
    monkeypatch.setattr(line_module, "poll", lambda *wait: {each for each in poll(*wait) if isinstance(each, int)})
    coordinator.conversation.drain()  # the line is in its wait from before
    coordinator.hear()
    coordinator.say(FATAL)
    os.kill(coordinator.child.pid, signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1 says why"):
        coordinator.stream().result()


def test_closing_from_another_thread_reaches_every_call(coordinator):
    callers = open_calls(coordinator)
    coordinator.conversation.close()
    errors = outcomes(coordinator, callers)
    assert [(type(error), str(error)) for error in errors] == [
        (PoolClosed, "this pool was closed by another thread")
    ] * 4


def test_reading_on_after_ones_own_close_says_so(coordinator):
    stream = coordinator.stream()
    coordinator.conversation.close()
    with pytest.raises(PoolClosed, match="this pool is closed; make a new one"):
        next(stream)
    stream.cancel()
    stream.close()


def test_silence_while_a_call_waits_ends_all_of_them(coordinator, monkeypatch):
    monkeypatch.setattr(conversation_module, "GRACE_S", 0.0)
    callers = open_calls(coordinator)
    callers.append(Caller(coordinator.stream(timeout_s=0.2).result))
    pid = coordinator.child.pid
    errors = outcomes(coordinator, callers)
    text = f"waited 0.2 s for a word of the coordinator (pid {pid}, sleeping); it and its ranks were ended"
    assert [(type(error), str(error), error.what, error.timeout_s) for error in errors] == [
        (DeadlineExceeded, text, "coordinator", 0.2)
    ] * 5


def test_a_coordinator_that_speaks_of_others_is_not_silent(coordinator, monkeypatch):
    """A request that waits behind another for longer than a step is no fault."""
    monkeypatch.setattr(conversation_module, "GRACE_S", 0.0)
    long, queued = coordinator.stream(), coordinator.stream(timeout_s=2.0)
    caller = Caller(queued.result)
    begin_s = time.monotonic()
    num_tokens = 0
    while time.monotonic() < begin_s + 2.5:
        coordinator.say_text(0, "a")
        num_tokens += 1
        time.sleep(0.05)
    coordinator.finish(0, num_tokens)
    coordinator.finish(1, 0)
    assert caller.outcome()[0].token_ids == ()
    assert len(long.result()[0].token_ids) == num_tokens


@pytest.mark.filterwarnings("ignore:Unclosed socket:ResourceWarning")  # as an error it keeps pyzmq from closing it
def test_an_interrupt_before_pyzmq_knows_the_new_socket_comes_through_at_once(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(zmq.Context, "_add_socket", interrupt)
    with pytest.raises(KeyboardInterrupt):
        conversation_module.Conversation("warning", 1)


def test_a_stream_that_nobody_reads_is_not_silent(coordinator, monkeypatch):
    monkeypatch.setattr(conversation_module, "GRACE_S", 0.0)
    stream = coordinator.stream(timeout_s=0.05)
    coordinator.finish(0, 0)
    time.sleep(0.3)
    assert len(stream.result()) == 1


def test_closing_a_stream_wakes_the_thread_that_reads_it(coordinator):
    stream = coordinator.stream()
    caller = Caller(lambda: list(stream))
    stream.close()
    assert caller.outcome() == []


@pytest.mark.parametrize("ended_before", [False, True])
def test_a_pool_that_is_dropped_leaves_no_process_and_no_descriptor(monkeypatch, ended_before):
    """Also where the coordinator ended the conversation and nobody heard of it."""
    gc.collect()
    descriptors = open_descriptors()
    with monkeypatch.context() as patch:  # it would hold the coordinator
        coordinator = FakeCoordinator(patch)
    pid = coordinator.child.pid
    if ended_before:
        line = coordinator.conversation.require_open()[1]
        coordinator.say(FATAL)
        wait_until(lambda: line.end is not None, "the end of the line")
        del line
    coordinator._context.destroy(linger=0)
    del coordinator
    gc.collect()
    wait_until(lambda: state_of(pid) == "", "the coordinator is gone, and was waited for")
    wait_until(lambda: open_descriptors() == descriptors, "all descriptors are closed")


def open_descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def test_what_is_no_message_ends_the_run(coordinator):
    coordinator._socket.send(b"junk")
    with pytest.raises(ProtocolError, match="that are none"):
        next(coordinator.stream())
    assert all_gone([coordinator.child.pid])
