"""Streams in tasks of an event loop, beside threads: the loop goes on. The coordinator is played by the test."""

import asyncio
import os
import signal
import threading

import pytest
from leafsum.errors import ConfigError, DeadlineExceeded, PoolClosed, RankError, RankLost
from leafsum.runtime import conversation as conversation_module
from leafsum.runtime.line import Line
from leafsum.runtime.messages import Cancel, Fatal, Submit
from leafsum.runtime.stream import Stream
from processes import all_gone, wait_until
from runtime.fake_coordinator import WAIT_S, Caller

FATAL = Fatal(kind="RankError", text="rank 1 says why", rank=1, step=3)


async def texts(stream: Stream) -> list[str | None]:
    return [delta.text async for delta in stream]


async def until_waiting(*streams: Stream) -> None:
    """Until a task waits for a word of each."""
    while not all(stream._inbox._waiting for stream in streams):
        await asyncio.sleep(0.001)


def test_tasks_read_their_streams_at_once_beside_a_thread(coordinator):
    streams = [coordinator.stream() for _ in range(4)]
    in_thread = Caller(streams[3].result)

    async def read_all():
        reading = [asyncio.create_task(texts(stream)) for stream in streams[:2]]
        reading.append(asyncio.create_task(streams[2].aresult()))
        await until_waiting(*streams[:3])
        for request_id in reversed(range(4)):
            coordinator.say_text(request_id, "abcd"[request_id] * 2)
            coordinator.finish(request_id, 2)
        return await asyncio.gather(*reading)

    first, second, third = asyncio.run(read_all())
    assert (first, second) == (["a", "a", ""], ["b", "b", ""])
    assert third[0].text == "cc"
    assert in_thread.outcome()[0].text == "dd"
    assert streams[0].result()[0].text == "aa"


def test_progress_is_told_to_a_task(coordinator):
    stream = coordinator.stream(num_prompts=2)
    coordinator.finish(0, 0)
    coordinator.finish(1, 0)
    told = []
    asyncio.run(stream.aresult(told.append))
    assert [(each.finished_prompts, each.total_prompts) for each in told] == [(1, 2), (2, 2)]


def test_a_waiting_task_costs_no_thread_and_no_turn_of_the_loop(coordinator):
    class CountingLoop(asyncio.SelectorEventLoop):
        num_turns = 0

        def _run_once(self):
            self.num_turns += 1
            super()._run_once()

    async def wait(loop: CountingLoop):
        num_threads = threading.active_count()
        streams = [coordinator.stream() for _ in range(20)]
        reading = [asyncio.create_task(stream.aresult()) for stream in streams]
        await until_waiting(*streams)
        before = loop.num_turns
        await asyncio.sleep(0.5)
        assert loop.num_turns - before < 10
        assert threading.active_count() == num_threads
        for request_id in range(20):
            coordinator.finish(request_id, 0)
        await asyncio.gather(*reading)

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, CountingLoop)
        runner.run(wait(loop))


def test_words_that_lie_there_keep_no_other_task_waiting(coordinator):
    """A stream that was not read for long has many; between two of them, others have their turn."""
    stream = coordinator.stream()
    coordinator.say_text(0, "a" * 200)
    coordinator.finish(0, 200)

    async def read():
        while stream._inbox._words.qsize() < 201:
            await asyncio.sleep(0.001)
        num_turns = 0

        async def count():
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        await stream.aresult()
        counting.cancel()
        return num_turns

    assert asyncio.run(read()) >= 200


def test_a_fatal_error_reaches_every_task_and_thread_and_the_loop_goes_on_while_all_ends(coordinator, monkeypatch):
    """The coordinator takes until the loop has done something else to leave."""
    streams = [coordinator.stream() for _ in range(3)]
    in_thread = Caller(streams[2].result)
    gone_on = threading.Event()
    join = Line.join

    def join_later(line, timeout_s):
        assert gone_on.wait(WAIT_S)
        join(line, timeout_s)

    monkeypatch.setattr(Line, "join", join_later)

    async def read():
        reading = [asyncio.create_task(stream.aresult()) for stream in streams[:2]]
        await until_waiting(*streams[:2])
        coordinator.say(FATAL)
        while coordinator.conversation.is_open:
            await asyncio.sleep(0.001)
        gone_on.set()
        return await asyncio.gather(*reading, return_exceptions=True)

    errors = [*asyncio.run(read()), in_thread.outcome()]
    assert [(type(error), str(error)) for error in errors] == [(RankError, "rank 1 says why")] * 3
    assert all_gone([coordinator.child.pid])
    assert not coordinator.conversation.run_folder.path.exists()


def test_the_coordinators_death_reaches_a_task(coordinator):
    os.kill(coordinator.child.pid, signal.SIGKILL)
    with pytest.raises(RankLost, match="is gone: signal SIGKILL"):
        asyncio.run(texts(coordinator.stream()))


def test_silence_ends_a_task_that_waits(coordinator, monkeypatch):
    monkeypatch.setattr(conversation_module, "GRACE_S", 0.0)
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.2 s for a word of the coordinator"):
        asyncio.run(coordinator.stream(timeout_s=0.2).aresult())


def test_closing_from_another_thread_reaches_a_task(coordinator):
    async def read():
        stream = coordinator.stream()
        reading = asyncio.create_task(stream.aresult())
        await until_waiting(stream)
        await asyncio.to_thread(coordinator.conversation.close)
        await reading

    with pytest.raises(PoolClosed, match="this pool was closed by another thread"):
        asyncio.run(read())


def test_a_cancelled_task_ends_its_stream_and_no_other(coordinator):
    mine, other = coordinator.stream(), coordinator.stream()

    async def read():
        reading = asyncio.create_task(mine.aresult())
        await until_waiting(mine)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert [coordinator.hear() for _ in range(3)][2] == Cancel(request_ids=(0,))
        assert await texts(mine) == []
        coordinator.finish(1, 0)
        return await other.aresult()

    assert len(asyncio.run(read())) == 1


def test_ctrl_c_in_a_program_with_a_loop_ends_the_stream_that_its_main_task_reads(coordinator):
    stream = coordinator.stream()

    async def read():
        asyncio.get_running_loop().call_later(0.1, signal.pthread_kill, threading.main_thread().ident, signal.SIGINT)
        await stream.aresult()

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(read())
    assert isinstance(coordinator.hear(), Submit)
    assert coordinator.hear() == Cancel(request_ids=(0,))


def test_leaving_the_block_cancels_what_is_left(coordinator):
    async def read():
        async with coordinator.stream(num_prompts=2) as stream:
            coordinator.finish(1, 0)
            assert (await anext(stream)).prompt_index == 1
        assert await texts(stream) == []
        with pytest.raises(ConfigError, match="closed while 1 of its 2 prompts were under way"):
            await stream.aresult()

    asyncio.run(read())
    assert isinstance(coordinator.hear(), Submit)
    assert coordinator.hear() == Cancel(request_ids=(0,))


def test_a_second_reader_is_refused_and_the_first_goes_on(coordinator):
    stream = coordinator.stream()

    async def read():
        reading = asyncio.create_task(stream.aresult())
        await until_waiting(stream)
        with pytest.raises(ConfigError, match="another thread or task reads this stream"):
            await stream.aresult()
        with pytest.raises(ConfigError, match="another thread or task reads this stream"):
            await asyncio.to_thread(stream.result)
        coordinator.finish(0, 0)
        return await reading

    assert len(asyncio.run(read())) == 1


def test_a_stream_may_be_read_in_one_loop_after_the_other_and_in_a_thread(coordinator):
    stream = coordinator.stream()
    coordinator.say_text(0, "abc")
    read = [asyncio.run(anext(stream)).text, next(stream).text, asyncio.run(anext(stream)).text]
    assert read == ["a", "b", "c"]


def test_a_loop_that_was_closed_under_its_task_does_the_line_no_harm(coordinator):
    stream, other = coordinator.stream(), coordinator.stream()
    loop = asyncio.new_event_loop()
    waiting = stream.__anext__()
    reading = loop.create_task(waiting)
    loop.run_until_complete(until_waiting(stream))
    loop.close()
    coordinator.say_text(0, "a")
    coordinator.finish(1, 0)
    assert len(other.result()) == 1
    waiting.close()
    assert list(stream) == [], "what ends the wait ends the stream"
    reading._log_destroy_pending = False  # type: ignore[attr-defined]


def test_closing_a_stream_wakes_the_task_that_reads_it(coordinator):
    async def read():
        stream = coordinator.stream()
        reading = asyncio.create_task(texts(stream))
        await until_waiting(stream)
        await asyncio.to_thread(stream.close)
        return await reading

    assert asyncio.run(read()) == []


def test_a_word_that_comes_while_a_wait_begins_is_not_missed(coordinator):
    """Words and waits meet in every order: each of thousands is read, and none waits for a deadline."""
    num_words = 3000
    stream = coordinator.stream(timeout_s=WAIT_S)
    sending = threading.Thread(target=coordinator.say_text, args=(0, "a" * num_words))

    async def read():
        sending.start()
        return [await asyncio.wait_for(anext(stream), WAIT_S) for _ in range(num_words)]

    assert len(asyncio.run(read())) == num_words
    sending.join()
    wait_until(stream._inbox.empty, "no word more")
