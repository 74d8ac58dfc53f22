"""Sampling parameters refuse what cannot be served; completions say what the contract names."""

import copy
import dataclasses
import hashlib
import pickle

import pytest
from leafsum.errors import PromptError
from leafsum.runtime.sampling import Completion, SamplingParams, token_sha256

COMPLETION = Completion(
    prompt="ab",
    prompt_token_ids=(97, 98),
    token_ids=(1, 258),
    text="x",
    finish_reason="stop",
    token_sha256=token_sha256((1, 258)),
    logits_sha256=None,
    residual_hash="00000000000000ff",
    tp=2,
)


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "8", None])
def test_max_tokens_below_one_or_of_another_type_is_refused(value):
    with pytest.raises(PromptError, match=r"max_tokens: expected an integer of at least 1, found"):
        SamplingParams(max_tokens=value)


def test_ignore_eos_is_a_bool():
    with pytest.raises(PromptError, match="ignore_eos: expected True or False, found 1"):
        SamplingParams(ignore_eos=1)  # type: ignore[arg-type]


def test_stop_is_one_text_or_several():
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(stop="END") == SamplingParams(stop=["END"]) == SamplingParams(stop=("END",))
    assert SamplingParams(stop=["a", "\n\n"]).stop_strings == ("a", "\n\n")
    assert len(SamplingParams(stop=["x" * 4096] * 64).stop_strings) == 64


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("", "stop: expected texts of 1 to 4096 characters, found 0"),
        (["a", ""], "stop: expected texts of 1 to 4096 characters, found 0"),
        ("x" * 4097, "stop: expected texts of 1 to 4096 characters, found 4097"),
        (["x"] * 65, "stop: expected at most 64 texts, found 65"),
        (None, "stop: expected a text, or a sequence of texts, found None"),
        (b"END", "stop: expected a text, or a sequence of texts, found b'END'"),
        ([1], r"stop: expected a text, or a sequence of texts, found \[1\]"),
        ("a\ud800", r"stop: expected text without U\+FFFD and lone surrogates"),
        (["a\ufffd"], r"stop: expected text without U\+FFFD and lone surrogates"),
    ],
)
def test_stop_strings_that_no_output_can_hold_are_refused(stop, text):
    with pytest.raises(PromptError, match=text):
        SamplingParams(stop=stop)


def test_an_unknown_parameter_is_refused_with_the_nearest_name():
    with pytest.raises(PromptError, match=r"max_token: no such sampling parameter; did you mean max_tokens\?"):
        SamplingParams(max_token=3)
    with pytest.raises(PromptError, match="qq: no such sampling parameter; known are ignore_eos, max_tokens, stop"):
        SamplingParams(qq=3)


def test_sampling_parameters_are_copied_and_pickled():
    params = SamplingParams(max_tokens=3, stop="END")
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params  # noqa: S301 (our own bytes)
    assert dataclasses.replace(params, max_tokens=4) == SamplingParams(max_tokens=4, stop="END")


def test_token_hash_is_over_little_endian_uint32():
    assert token_sha256((1, 258)) == hashlib.sha256(bytes([1, 0, 0, 0, 2, 1, 0, 0])).hexdigest()
    assert token_sha256(()) == hashlib.sha256(b"").hexdigest()


def test_only_a_failed_completion_has_an_error():
    found = dataclasses.replace(COMPLETION, finish_reason="failed", text="", token_ids=(), error="not finite").to_dict()
    assert (found["finish_reason"], found["text"], found["error"]) == ("failed", "", "not finite")
    assert "error" not in COMPLETION.to_dict()


@pytest.mark.parametrize("reason", ["END", 258])
def test_the_reason_of_a_stop_is_told_where_there_is_one(reason):
    assert dataclasses.replace(COMPLETION, stop_reason=reason).to_dict()["stop_reason"] == reason
    assert "stop_reason" not in COMPLETION.to_dict()


def test_layer_digests_are_told_as_one_hash():
    hashes = bytes(range(16))
    found = dataclasses.replace(COMPLETION, layer_hashes=hashes).to_dict()
    assert found["layer_digests_sha256"] == hashlib.sha256(hashes).hexdigest()
    assert "layer_digests_sha256" not in COMPLETION.to_dict()


def test_completion_has_the_fields_that_json_promises():
    found = COMPLETION.to_dict()
    assert list(found) == [
        "prompt",
        "text",
        "token_ids",
        "token_sha256",
        "finish_reason",
        "tp",
        "recoveries",
        "prompt_tokens",
        "output_tokens",
        "residual_hash",
        "prompt_token_ids",
    ]
    assert (found["prompt_tokens"], found["output_tokens"], found["token_ids"]) == (2, 2, [1, 258])
