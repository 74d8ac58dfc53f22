"""A pool in a host program: its signals, its forks, its event loops and its other pools are left alone."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from itertools import zip_longest
from pathlib import Path

import pytest
from leafsum.errors import PoolClosed, QueueFull
from leafsum.runtime.line import CLOSE_TIMEOUT_S
from leafsum.runtime.pool import WorkerPool
from leafsum.runtime.sampling import SamplingParams
from processes import all_gone, rank_pids, state_of, wait_until

PROMPTS = ["Once upon a time", [72, 105, 33], "a"]
SAMPLING = SamplingParams(max_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(model="tiny", tp=2, threads=1, kv_tokens=2048, queue_limit=4) as pool:
        yield pool


@pytest.fixture(scope="module")
def expected(pool):
    return pool.generate(PROMPTS, SAMPLING)


@pytest.fixture
def handlers():
    """A host program's own: a handler for every signal that may have one, and a wakeup descriptor."""
    numbers = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
    before = {number: signal.getsignal(number) for number in numbers}
    near, far = socket.socketpair()
    near.setblocking(False)
    own = {number: lambda *_: None for number in numbers}
    for number in numbers:
        signal.signal(number, own[number])
    fd_before = signal.set_wakeup_fd(near.fileno())
    yield own, near.fileno()
    signal.set_wakeup_fd(fd_before)
    for number in numbers:
        if before[number] is not None:
            signal.signal(number, before[number])
    near.close()
    far.close()


OF_THE_C_LIBRARY = 0b11 << 31
"""Signals 32 and 33, which glibc has for its threads and takes when the first is made."""


def signal_masks() -> list[int]:
    """What the kernel says: signals that are blocked, ignored and caught, in the main thread."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return [
        int(line.split()[1], 16) & ~OF_THE_C_LIBRARY
        for line in lines
        if line.startswith(("SigBlk", "SigIgn", "SigCgt"))
    ]


def test_signal_handlers_and_the_wakeup_descriptor_are_untouched_by_a_pools_whole_life(handlers):
    own, wakeup_fd = handlers
    masks = signal_masks()

    def untouched():
        assert {number: signal.getsignal(number) for number in own} == own
        assert signal.set_wakeup_fd(wakeup_fd) == wakeup_fd
        assert signal_masks() == masks

    pool = WorkerPool(model="tiny", tp=2, threads=1)
    untouched()
    with pool.stream(PROMPTS, LONG) as stream:
        next(stream)
        untouched()
        pool.drain()
    assert len(asyncio.run(pool.stream(PROMPTS, SAMPLING).aresult())) == 3
    untouched()
    pool.close()
    untouched()
    with contextlib.suppress(PoolClosed):
        pool.generate(["x"])
    untouched()


FORKING = """
import gc, os, sys, warnings
from leafsum import PoolClosed, SamplingParams, WorkerPool

warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads: that is the case here
pool = WorkerPool(model="tiny", threads=1)
sampling = SamplingParams(max_tokens=200, ignore_eos=True)
stream = pool.stream("Once", sampling)
expected = pool.generate(["Once"], sampling)
if (child := os.fork()) == 0:
    calls = {
        "generate": lambda: pool.generate(["x"]), "stream": lambda: pool.stream("x"), "witness": pool.witness,
        "drain": pool.drain, "next": lambda: next(stream), "coordinator_pid": lambda: pool.coordinator_pid,
    }
    for name, call in calls.items():
        try:
            call()
        except PoolClosed as error:
            print(name, error)
    stream.cancel()
    stream.close()
    pool.close()
    pool._conversation.run_folder.remove()
    del stream, pool
    gc.collect()
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
assert pool.run_folder.exists()
assert stream.result() == pool.generate(["Once"], sampling) == expected
pool.close()
print("whole")
"""


def test_a_forked_copy_is_refused_with_a_reason_and_does_no_harm_whatever_it_does_and_however_it_ends():
    command = [sys.executable, "-c", FORKING]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    *refused, whole = ended.stdout.splitlines()
    assert whole == "whole"
    names = ["generate", "stream", "witness", "drain", "next", "coordinator_pid"]
    assert [line.split(" ", 1)[0] for line in refused] == names
    for line in refused:
        assert "this pool belongs to process" in line
        assert "Make a WorkerPool after the fork, in the process that uses it" in line


def test_close_is_bounded_also_where_the_coordinator_is_stopped():
    pool = WorkerPool(model="tiny", tp=2, threads=1)
    pids = [pool.coordinator_pid, *rank_pids(pool.run_id)]
    assert len(pids) == 3
    os.kill(pids[0], signal.SIGSTOP)
    wait_until(lambda: state_of(pids[0]) == "T", "the coordinator has stopped")
    begin_s = time.monotonic()
    pool.close()
    assert time.monotonic() - begin_s < CLOSE_TIMEOUT_S, "it waited for one that can obey nothing"
    wait_until(lambda: all_gone(pids), "the ranks of a stopped coordinator")
    assert not pool.run_folder.exists()
    pool.close()


def test_two_pools_in_one_process_never_meet(pool, expected):
    with WorkerPool(model="tiny", tp=1, threads=1) as other:
        assert pool.run_id != other.run_id
        assert not {pool.coordinator_pid, *rank_pids(pool.run_id)} & {other.coordinator_pid, *rank_pids(other.run_id)}
        texts = [["", "", ""], ["", "", ""]]
        streams = [each.stream(PROMPTS, SAMPLING) for each in (pool, other)]
        for deltas in zip_longest(*streams):
            for index, delta in enumerate(deltas):
                if delta is not None:
                    texts[index][delta.prompt_index] += delta.text
        assert texts == [[each.text for each in expected]] * 2
        with other.stream("a", LONG) as stream:
            next(stream)
    assert pool.generate(PROMPTS, SAMPLING) == expected, "the other's end is its own"


def test_tasks_read_streams_at_once_beside_threads(pool, expected):
    from_thread = []
    thread = threading.Thread(target=lambda: from_thread.extend(pool.stream(PROMPTS[0], SAMPLING).result()))

    async def read(prompt):
        text = ""
        async with pool.stream(prompt, SAMPLING) as stream:
            async for delta in stream:
                text += delta.text
        return text, *await stream.aresult()

    async def read_all():
        thread.start()
        return await asyncio.gather(*map(read, PROMPTS))

    found = asyncio.run(read_all())
    thread.join(timeout=120)
    assert found == [(each.text, each) for each in expected]
    assert from_thread == expected[:1]


def test_a_cancelled_task_leaves_its_slot_to_the_next(pool, expected):
    async def cancel_one():
        reading = asyncio.create_task(pool.stream("Once", LONG).aresult())
        await asyncio.sleep(0.2)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        return await pool.stream(PROMPTS, SAMPLING).aresult()

    assert asyncio.run(cancel_one()) == expected


def test_a_pool_is_started_and_closed_beside_a_loop(expected):
    async def use():
        async with await asyncio.to_thread(WorkerPool, model="tiny", threads=1) as pool:
            pids = [pool.coordinator_pid, *rank_pids(pool.run_id)]
            return pids, await pool.stream(PROMPTS, SAMPLING).aresult()

    pids, found = asyncio.run(use())
    assert [each.token_sha256 for each in found] == [each.token_sha256 for each in expected]
    assert all_gone(pids)


def test_more_prompts_than_places_come_to_the_same(pool, expected):
    found = pool.generate(PROMPTS * 20, SAMPLING)
    assert found == expected * 20


def test_a_full_pool_refuses_and_serves_again(pool, expected):
    with pool.stream(["a"] * 6, LONG) as stream:
        next(stream)
        with pytest.raises(QueueFull, match="all 4 of queue_limit taken"):
            pool.generate(PROMPTS, SAMPLING)
        stream.cancel()
        assert {each.finish_reason for each in stream.result()} == {"cancelled"}
    assert pool.generate(PROMPTS, SAMPLING) == expected


def test_a_drained_pool_ends_what_has_begun_and_serves_again(pool, expected):
    pool.reconfigure(prefill_chunk=512, concurrency=1)
    try:
        with pool.stream(["Once"] * 6, SAMPLING) as stream:
            first = next(stream)
            pool.drain()
            found = stream.result()
    finally:
        pool.reconfigure(prefill_chunk=512, concurrency=16)
    assert first.prompt_index == 0
    assert [each.finish_reason for each in found] == ["length", *["cancelled"] * 5]
    assert pool.generate(PROMPTS, SAMPLING) == expected


def test_a_program_that_ignores_its_children_is_told_the_right_causes_all_the_same(tmp_path):
    """An ignored SIGCHLD is inherited, and a process that has it learns no exit code."""
    program = """
        import os, signal
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        from leafsum import RankLost, SamplingParams, WorkerPool
        sampling = SamplingParams(max_tokens=4, ignore_eos=True)
        with WorkerPool(model="tiny", tp=2, threads=1, kv_tokens=512) as pool:
            os.kill(pool.witness().ranks[1].pid, signal.SIGKILL)
            pool.generate([[1, 2]], sampling)
            print(pool.recoveries[0].cause)
            os.kill(pool.coordinator_pid, signal.SIGKILL)
            try:
                pool.generate([[1, 2]], sampling)
            except RankLost as error:
                print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=True)
    rank, coordinator = done.stdout.splitlines()
    assert "rank 1 of 2" in rank
    assert "signal SIGKILL" in rank
    assert "the coordinator" in coordinator
    assert "is gone: how it ended is not known here" in coordinator
