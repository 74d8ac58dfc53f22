"""Several callers on one line: each gets its own, whoever waits. The coordinator is played by the test."""

import gc
import signal
import threading

import msgspec
import pytest
from leafsum.errors import ConfigError, ModelError, ProtocolError
from leafsum.runtime.messages import Advance, AskWitness, Cancel, Submit
from leafsum.runtime.stream import Delta, Stream
from processes import wait_until
from runtime.fake_coordinator import WAIT_S, Caller, answer, ask, finished


def texts(stream: Stream) -> list[str | None]:
    return [delta.text for delta in stream]


def test_two_streams_are_read_alternately_in_one_thread(coordinator):
    first, second = coordinator.stream(), coordinator.stream()
    coordinator.say_text(0, "abc")
    coordinator.say_text(1, "xyz")
    read = [next(stream).text for _ in range(3) for stream in (second, first)]
    assert read == ["x", "a", "y", "b", "z", "c"]
    coordinator.finish(1, 3)
    coordinator.finish(0, 3)
    assert [first.result()[0].text, second.result()[0].text] == ["abc", "xyz"]


def test_a_stream_that_nobody_reads_holds_up_no_other(coordinator):
    unread, read = coordinator.stream(), coordinator.stream()
    coordinator.say_text(0, "a" * 500)
    coordinator.say_text(1, "b")
    coordinator.finish(1, 1)
    assert texts(read) == ["b", ""]
    coordinator.finish(0, 500)
    assert "".join(map(str, texts(unread))) == "a" * 500


def test_threads_wait_at_once_and_each_gets_its_own(coordinator):
    streams = [coordinator.stream() for _ in range(4)]
    callers = [Caller(stream.result) for stream in streams]
    questions = [Caller(lambda: coordinator.conversation.ask(ask, WAIT_S)) for _ in range(4)]
    asked = [heard.question for heard in (coordinator.hear() for _ in range(8)) if isinstance(heard, AskWitness)]
    for request_id in reversed(range(4)):
        coordinator.say_text(request_id, "abcd"[request_id])
        coordinator.say(answer(asked[request_id], num_steps=asked[request_id]))
        coordinator.finish(request_id, 1)
    assert [caller.outcome()[0].text for caller in callers] == ["a", "b", "c", "d"]
    assert sorted(caller.outcome().num_steps for caller in questions) == sorted(asked)


def test_a_second_thread_that_reads_a_stream_is_refused_and_the_first_goes_on(coordinator):
    stream = coordinator.stream()
    first = Caller(stream.result)
    wait_until(stream._reader.locked, "a reader")
    with pytest.raises(ConfigError, match="another thread or task reads this stream"):
        next(stream)
    coordinator.say_text(0, "a")
    coordinator.finish(0, 1)
    assert first.outcome()[0].text == "a"


def test_a_delta_has_a_token_and_the_last_its_completion(coordinator):
    stream = coordinator.stream(num_prompts=2)
    coordinator.say(Advance(request_id=1, num_prompt_rows=1, token_ids=()))
    coordinator.say_text(1, "é")
    coordinator.finish(1, 2)
    deltas = [next(stream) for _ in range(3)]
    assert deltas[:2] == [Delta(1, (0xC3,), ""), Delta(1, (0xA9,), "é")]
    assert deltas[2].completion is not None
    assert (deltas[2].prompt_index, deltas[2].token_ids, deltas[2].text) == (1, (), "")
    assert (deltas[2].completion.text, deltas[2].completion.token_ids) == ("é", (0xC3, 0xA9))
    coordinator.finish(0, 0, "cancelled")
    assert [each.finish_reason for each in stream.result()] == ["cancelled", "length"]
    assert list(stream) == []


def test_text_that_may_become_a_stop_string_is_held_back(coordinator):
    stream = coordinator.stream(stop=("END", "x"))
    coordinator.say_text(0, "aENbEEND")
    coordinator.finish(0, 8, "stop", "END")
    assert texts(stream) == ["a", "", "", "ENb", "", "E", "", "", ""]
    (completion,) = stream.result()
    assert (completion.text, completion.stop_reason, len(completion.token_ids)) == ("aENbE", "END", 8)


def test_what_is_held_back_comes_at_the_end_where_no_stop_string_does(coordinator):
    stream = coordinator.stream(stop="END")
    coordinator.say_text(0, "aEN")
    coordinator.say(Advance(request_id=0, num_prompt_rows=0, token_ids=(0xC3,)))
    coordinator.finish(0, 4)
    assert texts(stream) == ["a", "", "", "", "EN\N{REPLACEMENT CHARACTER}"]
    assert stream.result()[0].stop_reason is None


def test_a_decoder_that_changes_earlier_text_is_named(coordinator, monkeypatch):
    stream = coordinator.stream()
    monkeypatch.setattr(stream._tokenizer, "decode", lambda _ids: "other")
    coordinator.say_text(0, "a")
    coordinator.finish(0, 1)
    with pytest.raises(ModelError, match=r"changes earlier text.* begin with 'a', found 'other'"):
        list(stream)


@pytest.mark.parametrize(
    ("text", "residual_hash", "layer_hashes"), [("", "", b""), ("a", "0000000000000007", b"12345678")]
)
def test_a_cancelled_prompt_has_hashes_from_its_first_token_on(coordinator, text, residual_hash, layer_hashes):
    """Before that, its rows are those of no limit."""
    stream = coordinator.stream()
    coordinator.say_text(0, text)
    coordinator.say(msgspec.structs.replace(finished(0, len(text), "cancelled"), layer_hashes=b"12345678"))
    (completion,) = stream.result()
    assert (completion.residual_hash, completion.layer_hashes) == (residual_hash, layer_hashes)


def test_leaving_the_block_cancels_what_is_left(coordinator):
    with coordinator.stream(num_prompts=3) as stream:
        assert isinstance(coordinator.hear(), Submit)
        coordinator.finish(1, 0)
        assert next(stream).prompt_index == 1
        assert stream.cancel(1) is None
        assert coordinator.hears_nothing()
    assert coordinator.hear() == Cancel(request_ids=(0, 2))
    coordinator.say_text(0, "late")
    assert list(stream) == []
    with pytest.raises(ConfigError, match="closed while 2 of its 3 prompts were under way"):
        stream.result()
    stream.close()
    assert coordinator.hears_nothing()


def test_a_stream_that_was_read_to_its_end_has_nothing_to_cancel(coordinator):
    with coordinator.stream() as stream:
        coordinator.finish(0, 0)
        assert len(list(stream)) == 1
    assert isinstance(coordinator.hear(), Submit)
    assert coordinator.hears_nothing()
    assert len(stream.result()) == 1
    line = coordinator.conversation.require_open()[1]
    assert (line._admission._places, line._of_question) == ({}, {}), "an inbox is kept for what has ended"


def test_a_dropped_stream_is_cancelled(coordinator):
    coordinator.stream()
    gc.collect()
    assert isinstance(coordinator.hear(), Submit)
    assert coordinator.hear() == Cancel(request_ids=(0,))


def test_an_exception_out_of_a_stream_cancels_it(coordinator, monkeypatch):
    stream = coordinator.stream()

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(coordinator.conversation, "receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    assert isinstance(coordinator.hear(), Submit)
    assert coordinator.hear() == Cancel(request_ids=(0,))
    assert list(stream) == []


def test_ctrl_c_in_one_call_leaves_the_others_whole(coordinator):
    other, mine = coordinator.stream(), coordinator.stream()
    caller = Caller(other.result)
    coordinator.say_text(0, "a" * 50)
    interrupting = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))

    def read_until_interrupted():
        interrupting.start()
        next(mine)

    with pytest.raises(KeyboardInterrupt):
        read_until_interrupted()
    coordinator.say_text(0, "b" * 50)
    coordinator.finish(0, 100)
    assert caller.outcome()[0].text == "a" * 50 + "b" * 50
    assert list(mine) == []


def test_words_are_received_by_no_callers_thread(coordinator):
    """A signal handler may raise between any two instructions of the main thread, and would lose a word there."""
    assert "leafsum-pool" in [thread.name for thread in threading.enumerate()]
    stream = coordinator.stream()
    coordinator.say_text(0, "a")
    wait_until(lambda: not stream._inbox.empty(), "a word that nobody waits for")


def test_missing_tokens_are_an_error_of_the_stream(coordinator):
    stream = coordinator.stream()
    coordinator.say_text(0, "a")
    coordinator.finish(0, 2)
    with pytest.raises(ProtocolError, match="request 0 ended after 2 tokens, 1 came"):
        stream.result()


def test_a_stop_string_that_the_tokens_do_not_have_is_an_error_of_the_stream(coordinator):
    stream = coordinator.stream(stop="b")
    coordinator.say_text(0, "a")
    coordinator.finish(0, 1, "stop", "b")
    with pytest.raises(ProtocolError, match=r"ended at the stop string 'b'; expected it first .* found None"):
        stream.result()


@pytest.mark.parametrize("prompt_index", [-1, 2, "a", 1.0, True])
def test_cancelling_a_prompt_that_is_not_there_is_refused(prompt_index, coordinator):
    with pytest.raises(ConfigError, match="expected a prompt index of 0 to 1"):
        coordinator.stream(num_prompts=2).cancel(prompt_index)
