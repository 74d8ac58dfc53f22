"""Sampling parameters refuse what cannot be served; completions say what the contract names."""

import dataclasses
import hashlib

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


def test_token_hash_is_over_little_endian_uint32():
    assert token_sha256((1, 258)) == hashlib.sha256(bytes([1, 0, 0, 0, 2, 1, 0, 0])).hexdigest()
    assert token_sha256(()) == hashlib.sha256(b"").hexdigest()


def test_only_a_failed_completion_has_an_error():
    found = dataclasses.replace(COMPLETION, finish_reason="failed", text="", token_ids=(), error="not finite").to_dict()
    assert (found["finish_reason"], found["text"], found["error"]) == ("failed", "", "not finite")
    assert "error" not in COMPLETION.to_dict()


def test_completion_has_the_fields_that_json_promises():
    found = COMPLETION.to_dict()
    assert list(found) == [
        "prompt",
        "text",
        "token_ids",
        "token_sha256",
        "finish_reason",
        "tp",
        "prompt_tokens",
        "output_tokens",
        "residual_hash",
        "prompt_token_ids",
    ]
    assert (found["prompt_tokens"], found["output_tokens"], found["token_ids"]) == (2, 2, [1, 258])
