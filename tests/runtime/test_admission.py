"""How many requests a pool holds, and how the rest of a long list follows. The coordinator is played by the test."""

import gc
import threading
import time

import pytest
from leafsum.errors import QueueFull, RankError
from leafsum.runtime import conversation as conversation_module
from leafsum.runtime.messages import Cancel, Drain, Fatal, Submit
from processes import wait_until
from runtime.fake_coordinator import WAIT_S, Caller, FakeCoordinator, finished


def submitted(coordinator: FakeCoordinator) -> list[int]:
    """Request ids of the next message."""
    message = coordinator.hear()
    assert isinstance(message, Submit), message
    return [order.request_id for order in message.orders]


def num_places(coordinator: FakeCoordinator) -> int:
    return len(coordinator.conversation.require_open()[1]._admission._places)


def test_of_a_long_list_the_rest_follows_as_its_own_requests_end_in_order(narrow):
    stream = narrow.stream(num_prompts=5)
    assert submitted(narrow) == [0, 1]
    narrow.finish(1, 0)
    assert next(stream).prompt_index == 1
    assert submitted(narrow) == [2]
    for request_id, follower in ((2, [3]), (0, [4])):
        narrow.say_text(request_id, "abcde"[request_id])
        narrow.finish(request_id, 1)
        assert [next(stream).prompt_index for _ in range(2)] == [request_id] * 2
        assert submitted(narrow) == follower
    narrow.finish(4, 0)
    narrow.finish(3, 0)
    assert [each.text for each in stream.result()] == ["a", "", "c", "", ""]
    assert narrow.hears_nothing()
    assert num_places(narrow) == 0


def test_an_unread_stream_submits_nothing_more(narrow):
    stream = narrow.stream(num_prompts=4)
    assert submitted(narrow) == [0, 1]
    narrow.finish(0, 0)
    narrow.finish(1, 0)
    assert narrow.hears_nothing()
    next(stream)
    assert submitted(narrow) == [2]
    assert narrow.hears_nothing(), "one for one: what is unread and what is under way are two together"


def test_a_call_for_which_nothing_is_free_is_refused_and_nothing_of_it_is_taken(narrow):
    stream = narrow.stream(num_prompts=2)
    assert submitted(narrow) == [0, 1]
    text = (
        r"expected a free place for 3 more requests, found all 2 of queue_limit taken; nothing of this call was taken"
    )
    with pytest.raises(QueueFull, match=f"{text}.*higher queue_limit"):
        narrow.stream(num_prompts=3)
    assert narrow.hears_nothing()
    narrow.finish(1, 0)
    wait_until(lambda: num_places(narrow) == 1, "an ended request holds no place, read or not")
    narrow.stream(num_prompts=3)
    assert submitted(narrow) == [5]
    assert stream.cancel() is None


def test_no_prompts_need_no_place(narrow):
    stream = narrow.stream(num_prompts=2)
    assert narrow.stream(num_prompts=0).result() == []
    stream.close()


def test_places_of_a_stream_that_was_given_up_are_free_when_the_coordinator_has_ended_its_requests(narrow):
    with narrow.stream(num_prompts=4) as stream:
        assert submitted(narrow) == [0, 1]
        narrow.finish(0, 0)  # its place waits for a reader, and is free at once when there is none
        wait_until(lambda: not stream._inbox.empty(), "the word")
    assert narrow.hear() == Cancel(request_ids=(1,))
    assert num_places(narrow) == 1
    other = narrow.stream()
    assert submitted(narrow) == [4]
    with pytest.raises(QueueFull):
        narrow.stream()
    narrow.finish(1, 0, "cancelled")
    wait_until(lambda: num_places(narrow) == 1, "the place of what was cancelled")
    narrow.finish(4, 0)
    assert len(other.result()) == 1


def test_a_dropped_stream_leaves_no_place_behind(narrow):
    narrow.stream(num_prompts=4)
    gc.collect()
    assert submitted(narrow) == [0, 1]
    assert narrow.hear() == Cancel(request_ids=(0, 1))
    narrow.finish(0, 0, "cancelled")
    narrow.finish(1, 0, "cancelled")
    wait_until(lambda: num_places(narrow) == 0, "both places")


def test_a_prompt_that_was_not_submitted_is_cancelled_without_the_coordinator(narrow):
    stream = narrow.stream(num_prompts=4)
    assert submitted(narrow) == [0, 1]
    stream.cancel(2)
    assert next(stream).completion.finish_reason == "cancelled"
    assert narrow.hears_nothing()
    narrow.finish(0, 0)
    next(stream)
    assert submitted(narrow) == [3]
    narrow.finish(1, 0)
    narrow.finish(3, 0)
    found = stream.result()
    assert [each.finish_reason for each in found] == ["length", "length", "cancelled", "length"]
    assert [each.tp for each in found] == [3, 3, 0, 3]


def test_cancelling_a_stream_ends_all_of_it(narrow):
    stream = narrow.stream(num_prompts=5)
    assert submitted(narrow) == [0, 1]
    narrow.finish(0, 0)
    wait_until(lambda: not stream._inbox.empty(), "the word")
    stream.cancel()
    assert narrow.hear() == Cancel(request_ids=(1,))
    assert num_places(narrow) == 1
    narrow.finish(1, 0, "cancelled")
    assert [each.finish_reason for each in stream.result()] == ["length", *["cancelled"] * 4]
    assert narrow.hears_nothing()
    assert num_places(narrow) == 0


def test_a_drain_ends_what_was_not_submitted_and_tells_the_coordinator(narrow):
    stream = narrow.stream(num_prompts=4)
    assert submitted(narrow) == [0, 1]
    narrow.conversation.drain()
    assert narrow.hear() == Drain()
    narrow.finish(1, 0, "cancelled")  # it had not begun
    narrow.finish(0, 0)
    assert [each.finish_reason for each in stream.result()] == ["length", *["cancelled"] * 3]
    later = narrow.stream(num_prompts=3)
    assert submitted(narrow) == [4, 5]
    narrow.finish(4, 0)
    next(later)
    assert submitted(narrow) == [6]


def test_an_end_of_the_line_reaches_a_call_whose_requests_wait(narrow):
    caller = Caller(narrow.stream(num_prompts=4).result)
    assert submitted(narrow) == [0, 1]
    narrow.say(Fatal(kind="RankError", text="rank 1 says why", rank=1, step=3))
    assert isinstance(caller.outcome(), RankError)


def test_a_full_pool_that_has_ended_says_why_it_ended(narrow):
    narrow.stream(num_prompts=2)
    narrow.say(Fatal(kind="RankError", text="rank 1 says why", rank=1, step=3))
    wait_until(lambda: narrow.conversation._line.end is not None, "the end of the line")
    with pytest.raises(RankError, match="rank 1 says why"):
        narrow.stream().result()


def test_an_interrupt_between_taking_places_and_submitting_gives_them_back(narrow, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversation_module, "submits", interrupt)
        with pytest.raises(KeyboardInterrupt):
            narrow.stream(num_prompts=4)
    wait_until(lambda: num_places(narrow) == 0, "all places")
    narrow.stream(num_prompts=2)
    assert submitted(narrow) == [4, 5]


class SlowPlaces(dict):
    """Between counting what is taken and taking the rest, others have their turn."""

    def __len__(self) -> int:
        found = super().__len__()
        time.sleep(0.002)
        return found


class Counting(threading.Thread):
    """Ends each request as soon as the pool cannot hold more, and notes how many it ever held."""

    def __init__(self, coordinator: FakeCoordinator, num_requests: int) -> None:
        super().__init__(daemon=True)
        self.coordinator = coordinator
        self.num_requests = num_requests
        self.most = 0

    def run(self) -> None:
        held: list[int] = []
        while self.num_requests:
            while self.coordinator._socket.poll(0 if held else WAIT_S * 1000):
                held += submitted(self.coordinator)
                self.most = max(self.most, len(held))
            self.coordinator.say(finished(held.pop(0), 0))
            self.num_requests -= 1


@pytest.mark.parametrize(("num_threads", "num_prompts", "limit"), [(8, 50, 5), (1, 10_000, 64)])
def test_a_pool_never_holds_more_whatever_comes(monkeypatch, num_threads, num_prompts, limit):
    coordinator = FakeCoordinator(monkeypatch, queue_limit=limit)
    coordinator.conversation.require_open()[1]._admission._places = SlowPlaces()
    counting = Counting(coordinator, num_threads * num_prompts)
    counting.start()

    def call():
        while True:
            try:
                return coordinator.stream(num_prompts=num_prompts).result()
            except QueueFull:
                time.sleep(0.001)

    callers = [Caller(call) for _ in range(num_threads)]
    outcomes = [caller.outcome() for caller in callers]
    assert [len(outcome) for outcome in outcomes] == [num_prompts] * num_threads
    assert 1 <= counting.most <= limit
    assert num_places(coordinator) == 0
    coordinator.close()
