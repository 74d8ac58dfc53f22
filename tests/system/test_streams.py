"""Streams, stop strings and cancellation as a program uses them: real processes, the demonstration model."""

import shutil
import threading
from itertools import zip_longest

import numpy as np
import pytest
import torch
from leafsum.errors import PromptError
from leafsum.ranks.tiny import ensure_tiny
from leafsum.runtime.pool import WorkerPool
from leafsum.runtime.sampling import Completion, SamplingParams

PROMPTS = ["Once upon a time", [72, 105, 33], "a"]
NUM_TOKENS = 24
KV_TOKENS = 512
SAMPLING = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
LONG = SamplingParams(max_tokens=KV_TOKENS - 64, ignore_eos=True)
"""One such request takes all pages but one."""


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(model="tiny", tp=2, threads=1, digests=True, layer_digests=True, kv_tokens=KV_TOKENS) as pool:
        yield pool


@pytest.fixture(scope="module")
def expected(pool) -> list[Completion]:
    return pool.generate(PROMPTS, SAMPLING)


def bits(completion: Completion) -> tuple[object, ...]:
    hashes = (completion.token_sha256, completion.logits_sha256, completion.residual_hash, completion.layer_hashes)
    return completion.token_ids, *hashes


def test_a_stream_comes_to_what_generate_does(pool, expected):
    texts, token_ids = [""] * 3, [[], [], []]
    with pool.stream(PROMPTS, SAMPLING) as stream:
        for delta in stream:
            texts[delta.prompt_index] += delta.text
            token_ids[delta.prompt_index] += delta.token_ids
    assert stream.result() == expected
    assert texts == [each.text for each in expected]
    assert token_ids == [list(each.token_ids) for each in expected]


@pytest.mark.parametrize("prompt", ["Once upon a time", (72, 105, 33), [*np.array([72, 105, 33])]])
def test_one_prompt_needs_no_list(pool, expected, prompt):
    (completion,) = pool.stream(prompt, SAMPLING).result()
    assert completion in expected


@pytest.mark.parametrize("as_array", [np.array, torch.tensor])
def test_a_list_of_arrays_is_a_list_of_prompts(pool, expected, as_array):
    arrays = [as_array([72, 105, 33]), as_array([97])]
    for completions in (pool.stream(arrays, SAMPLING).result(), pool.generate(arrays, SAMPLING)):
        assert list(map(bits, completions)) == list(map(bits, expected[1:]))


def test_no_prompts_are_an_empty_stream(pool):
    assert list(pool.stream([])) == []


def test_streams_and_calls_are_under_way_at_once_in_one_thread(pool, expected):
    streams = [pool.stream(prompt, SAMPLING) for prompt in PROMPTS]
    texts = ["", "", ""]
    for deltas in zip_longest(*streams):
        for index, delta in enumerate(deltas):
            texts[index] += delta.text if delta else ""
        if not any(texts[1:]):
            assert pool.generate(PROMPTS, SAMPLING) == expected
    assert texts == [each.text for each in expected]


def test_streams_are_read_in_several_threads_at_once(pool, expected):
    found = {}

    def read(index):
        found[index] = "".join(delta.text or "" for delta in pool.stream(PROMPTS[index % 3], SAMPLING))

    threads = [threading.Thread(target=read, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert found == {index: expected[index % 3].text for index in range(6)}


@pytest.mark.parametrize(
    ("prompts", "sampling", "text"),
    [
        ("", SAMPLING, "prompt 0: .*at least one token"),
        (["fine", [1, -1]], SAMPLING, "prompt 1, position 1: expected a token id"),
        (b"Hi", SAMPLING, "prompt 0: expected text, or a sequence of token ids, got bytes"),
        ("x", SamplingParams(max_tokens=10**6), "prompt 0: .*this pool serves 512"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_before_anything_runs(pool, prompts, sampling, text):
    before = pool.witness().steps
    with pytest.raises(PromptError, match=text):
        pool.stream(prompts, sampling)
    assert pool.witness().steps == before


def test_a_cancelled_neighbour_changes_no_bit(pool, expected):
    with pool.stream("a neighbour", SamplingParams(max_tokens=200, ignore_eos=True)) as neighbour:
        next(neighbour)
        with pool.stream(PROMPTS, SAMPLING) as stream:
            for delta in stream:
                if len(delta.token_ids) and delta.prompt_index == 2:
                    neighbour.cancel()
        assert list(map(bits, stream.result())) == list(map(bits, expected))
        (cancelled,) = neighbour.result()
    assert cancelled.finish_reason == "cancelled"
    assert cancelled.stop_reason is None
    num_tokens = len(cancelled.token_ids)
    assert 1 <= num_tokens < 200
    (limited,) = pool.generate(["a neighbour"], SamplingParams(max_tokens=num_tokens, ignore_eos=True))
    assert bits(cancelled) == bits(limited)
    assert cancelled.text == limited.text


def test_one_prompt_of_several_is_cancelled_and_the_others_go_on(pool, expected):
    with pool.stream(PROMPTS, SAMPLING) as stream:
        stream.cancel(1)
        first, second, third = stream.result()
    assert [bits(first), bits(third)] == [bits(expected[0]), bits(expected[2])]
    assert second.finish_reason == "cancelled"
    assert second.token_ids == expected[1].token_ids[: len(second.token_ids)]


def test_a_cancelled_request_leaves_its_pages_to_the_next(pool, expected):
    """The second waits for pages that the first holds; were they not free, it would wait for hundreds of tokens."""
    with pool.stream("hold", LONG) as holding, pool.stream(PROMPTS[0], SAMPLING) as waiting:
        next(holding)
        queued = pool.stream("queued", LONG)
        queued.cancel()
        assert (queued.result()[0].finish_reason, queued.result()[0].token_ids) == ("cancelled", ())
        with pool.stream("hold too", LONG) as second:
            holding.cancel()
            next(second)
        assert holding.result()[0].finish_reason == "cancelled"
        assert list(map(bits, waiting.result())) == [bits(expected[0])]


@pytest.mark.parametrize("prefill_chunk", [1, 0])
@pytest.mark.parametrize("num_characters", [1, 2, 5])
def test_a_stop_string_ends_text_before_it_and_ids_with_it(pool, expected, prefill_chunk, num_characters):
    """The demonstration model has one id a byte: the text up to the stop string's end is as long as its ids."""
    pool.reconfigure(prefill_chunk=prefill_chunk, concurrency=2)
    stops = [each.text[6 : 6 + num_characters] for each in expected]
    sampling = [SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, stop=("no such text", stop)) for stop in stops]
    found = pool.generate(PROMPTS, sampling)
    for completion, whole, stop in zip(found, expected, stops, strict=True):
        begin = whole.text.index(stop)
        num_tokens = begin + num_characters
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert completion.text == whole.text[:begin]
        assert completion.token_ids == whole.token_ids[:num_tokens]
        (limited,) = pool.generate([whole.prompt or whole.prompt_token_ids], SamplingParams(num_tokens, True))
        assert bits(completion) == bits(limited), "no row beyond the last token is in a hash"
    streamed = [["", None] for _ in PROMPTS]
    for delta in pool.stream(PROMPTS, sampling):
        streamed[delta.prompt_index][0] += delta.text
        streamed[delta.prompt_index][1] = delta.completion
    assert streamed == [[completion.text, completion] for completion in found]


def test_a_stop_string_wins_over_the_limit_that_its_token_reaches(pool, expected):
    (completion,) = pool.generate(PROMPTS[:1], SamplingParams(3, True, stop=expected[0].text[2]))
    assert completion.finish_reason == "stop"
    assert completion.stop_reason == expected[0].text[2]


def test_a_stop_string_in_the_prompt_does_not_count(pool, expected):
    (completion,) = pool.generate(PROMPTS[:1], SamplingParams(NUM_TOKENS, True, stop="Once"))
    assert bits(completion) == bits(expected[0])


def test_a_folder_without_a_tokenizer_refuses_stop_strings(tmp_path):
    folder = shutil.copytree(ensure_tiny(), tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    with WorkerPool(model=str(folder), threads=1) as pool:
        with pytest.raises(PromptError, match=r"prompt 0: stop: expected a model folder with a tokenizer\.json"):
            pool.generate([[1, 2]], SamplingParams(stop="x"))
        deltas = list(pool.stream([1, 2], SamplingParams(max_tokens=2, ignore_eos=True)))
    assert [delta.text for delta in deltas] == [None] * 3
    assert deltas[-1].completion is not None
    assert deltas[-1].completion.text is None
