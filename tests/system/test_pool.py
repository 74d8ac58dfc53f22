"""The pool as a program uses it: real processes, the demonstration model."""

import os
import stat
import threading

import pytest
import zmq
from leafsum.errors import ConfigError, PoolClosed, PromptError
from leafsum.runtime.pool import WorkerPool
from leafsum.runtime.sampling import SamplingParams
from processes import all_gone, title_of

PROMPTS = ["Once upon a time", [72, 105, 33], "a"]
SAMPLING = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(model="tiny", tp=2, threads=1, digests=True, kv_tokens=512) as pool:
        yield pool


def test_completions_come_in_the_order_of_the_prompts(pool):
    alone = [pool.generate([prompt], SAMPLING)[0] for prompt in PROMPTS]
    together = pool.generate(PROMPTS, SAMPLING)
    assert together == alone
    assert together[0].prompt == PROMPTS[0]
    assert together[1].prompt is None
    assert together[1].prompt_token_ids == (72, 105, 33)
    assert all(len(each.token_ids) == 8 and each.finish_reason == "length" for each in together)
    assert all(each.text is not None and len(each.logits_sha256 or "") == 64 for each in together)


def test_each_prompt_may_have_its_own_sampling_parameters(pool):
    lengths = [3, 1, 5]
    completions = pool.generate(PROMPTS, [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths])
    assert [len(each.token_ids) for each in completions] == lengths
    longest = pool.generate(PROMPTS, SAMPLING)
    assert [long.token_ids[:n] for long, n in zip(longest, lengths, strict=True)] == [c.token_ids for c in completions]


def test_no_prompts_are_no_work(pool):
    assert pool.generate([]) == []


def test_progress_is_told_and_ends_at_the_whole(pool):
    told = []
    pool.generate(PROMPTS, SAMPLING, on_progress=told.append)
    assert told[-1].finished_prompts == told[-1].total_prompts == 3
    assert told[-1].output_tokens == 24
    assert told[-1].prompt_tokens_done == sum(len(each.prompt_token_ids) for each in pool.generate(PROMPTS, SAMPLING))


@pytest.mark.parametrize(
    ("prompts", "sampling", "text"),
    [
        ([[]], SAMPLING, "prompt 0: .*at least one token"),
        (["fine", ""], SAMPLING, "prompt 1: .*at least one token"),
        ([[1, -1]], SAMPLING, "prompt 0, position 1: expected a token id"),
        ([[1, 10**6]], SAMPLING, "prompt 0, position 1: expected a token id"),
        ([[1] * 600], SAMPLING, "prompt 0: .*this pool serves 512"),
        ([[1] * 510], SAMPLING, "ask for at most 2 tokens"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_and_the_pool_goes_on(pool, prompts, sampling, text):
    with pytest.raises(PromptError, match=text):
        pool.generate(prompts, sampling)
    assert len(pool.generate(["again"], SAMPLING)) == 1


def test_an_interrupted_generation_leaves_the_pool_usable(pool):
    expected = pool.generate(PROMPTS, SAMPLING)

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.generate(PROMPTS, SamplingParams(max_tokens=100, ignore_eos=True), on_progress=interrupt)
    assert pool.generate(PROMPTS, SAMPLING) == expected


def test_limits_can_change_while_idle_and_never_a_token(pool):
    expected = pool.generate(PROMPTS, SAMPLING)
    pool.reconfigure(prefill_chunk=1, concurrency=2)
    assert pool.generate(PROMPTS, SAMPLING) == expected
    assert pool.witness().most_live_requests == 2
    pool.reconfigure(prefill_chunk=0, concurrency=16)
    assert pool.generate(PROMPTS, SAMPLING) == expected
    assert pool.witness().most_live_requests == 3
    with pytest.raises(ConfigError, match="1 to 16"):
        pool.reconfigure(prefill_chunk=0, concurrency=17)


def test_the_witness_counts_what_each_rank_exchanged(pool):
    before = pool.witness()
    pool.generate(["x"], SAMPLING)
    after = pool.witness()
    assert [rank.rank for rank in after.ranks] == [0, 1]
    assert after.steps > before.steps
    for rank_before, rank_after in zip(before.ranks, after.ranks, strict=True):
        assert rank_after.exchanges > rank_before.exchanges
        assert rank_after.bytes_sent > rank_before.bytes_sent
        assert rank_after.bytes_received > rank_before.bytes_received


def test_every_process_shows_its_role(pool):
    run_id = pool.run_id
    assert title_of(pool.coordinator_pid) == f"leafsum: coordinator {run_id}"
    titles = [title_of(rank.pid) for rank in pool.witness().ranks]
    assert titles == [f"leafsum: rank {rank}/2 {run_id}" for rank in range(2)]


def test_the_run_folder_is_private(pool):
    folder = pool.run_folder
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert pool.run_id in folder.name


def test_threads_may_all_generate_at_once(pool):
    expected = pool.generate(PROMPTS, SAMPLING)
    found = []
    threads = [threading.Thread(target=lambda: found.append(pool.generate(PROMPTS, SAMPLING))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert found == [expected] * 3


def test_generate_within_its_own_progress_is_one_more_request(pool):
    expected = pool.generate(PROMPTS, SAMPLING)
    within = []
    found = pool.generate(PROMPTS, SAMPLING, on_progress=lambda _: within.append(pool.generate(PROMPTS, SAMPLING)))
    assert found == expected
    assert within == [expected] * len(within)
    assert len(within) > 8


def test_an_unknown_argument_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"treads: no such setting; did you mean threads\?"):
        WorkerPool(model="tiny", treads=1)


@pytest.mark.parametrize("prompts", ["abc", b"abc", None, {"Hi": 1}, iter(["Hi"])])
def test_what_is_no_sequence_of_prompts_is_refused(pool, prompts):
    with pytest.raises(ConfigError, match="sequence of prompts"):
        pool.generate(prompts, SAMPLING)


@pytest.mark.parametrize("prompt", [b"Hi", bytearray(b"Hi"), {72: 1}, {72, 105}, [True, False], [1.5], None, 7])
def test_what_is_neither_text_nor_ids_is_refused(pool, prompt):
    with pytest.raises(PromptError, match="prompt 0: expected text, or a sequence of token ids"):
        pool.generate([prompt], SAMPLING)


@pytest.mark.parametrize("sampling", [None, {"max_tokens": 3}, [3], [SAMPLING, SAMPLING]])
def test_what_are_no_sampling_parameters_is_refused(pool, sampling):
    with pytest.raises(ConfigError, match=r"SamplingParams|sampling parameters for 1"):
        pool.generate(["x"], sampling)


def test_a_second_peer_on_the_pools_socket_takes_no_part(pool):
    expected = pool.generate(PROMPTS, SAMPLING)
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(f"ipc://{pool.run_folder / 'host.sock'}")
    try:
        assert [pool.generate(PROMPTS, SAMPLING) for _ in range(3)] == [expected] * 3
    finally:
        context.destroy(linger=0)


def test_closing_from_another_thread_ends_a_generation():
    pool = WorkerPool(model="tiny", threads=1)
    pids = [pool.coordinator_pid, *(rank.pid for rank in pool.witness().ranks)]
    closer = threading.Thread(target=pool.close)

    def close_once_decoding(progress):
        if progress.output_tokens == 5:
            closer.start()

    with pytest.raises(PoolClosed):
        pool.generate(["x"], SamplingParams(max_tokens=4000, ignore_eos=True), on_progress=close_once_decoding)
    closer.join(timeout=60)
    assert not closer.is_alive()
    assert all_gone(pids)


def test_a_closed_pool_leaves_nothing_and_says_that_it_is_closed():
    pool = WorkerPool(model="tiny", kv_tokens=256)
    pids = [pool.coordinator_pid, *(rank.pid for rank in pool.witness().ranks)]
    threads_before = threading.active_count()
    pool.close()
    pool.close()
    assert all_gone(pids)
    assert not pool.run_folder.exists()
    assert threading.active_count() <= threads_before
    with pytest.raises(PoolClosed):
        pool.generate(["x"])
