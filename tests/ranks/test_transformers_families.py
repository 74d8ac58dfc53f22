"""Arithmetic of the families with DeltaNet against transformers in float64: small random models of every option.

Each model reads a prompt in chunks and decodes rows one at a time, beside one of one to three tokens, shorter than any
window of a convolution or n-gram. The tokens are those that the reference decodes greedily with its own memory.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_checkpoints import FAMILIES, model_class, write_family
from model_runs import Row, run_single
from reference_runs import Comparison, Reference, compare, load_reference, reference_run

TOLERANCE = 1e-4
"""Of the largest logit. A DeltaNet output near zero is normalised, which enlarges the rounding before it: the same
models in torch's FP32 differ by up to 7e-5."""

NUM_DECODED = 32
NUM_DECODED_OF_SHORT = 12
CHUNK_ROWS = 13

PARTIAL_ROTARY = {"partial_rotary_factor": 0.25}
HALF_ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5}}
WHOLE_ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}
MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    }
}
YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 5e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.5,
    },
    "max_position_embeddings": 256,
}
LINEAR_ROPE = {
    "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0, "partial_rotary_factor": 0.25}
}
TOP_LEVEL_ROPE = {"rope_parameters": ..., "rope_theta": 2e4, "partial_rotary_factor": 0.5}


def deltanet_heads(num_key_heads: int, num_value_heads: int) -> dict[str, int]:
    return {"linear_num_key_heads": num_key_heads, "linear_num_value_heads": num_value_heads}


def heads(num_heads: int, num_kv_heads: int, head_dim: int = 16) -> dict[str, int]:
    return {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}


def layers(kinds: str, attention: str = "full_attention") -> dict[str, Any]:
    """A letter a layer: d DeltaNet, a attention."""
    names = {"d": "linear_attention", "a": attention}
    return {"num_hidden_layers": len(kinds), "layer_types": [names[kind] for kind in kinds]}


NO_LAYER_TYPES = {"layer_types": ..., "num_hidden_layers": 4}

MANY_EXPERTS = {
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 4,
    "shared_expert_intermediate_size": 8,
    "fused": True,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "linear_attention"],
}

COMMON: dict[str, dict[str, Any]] = {
    "base": {},
    "every_value_head_its_own_key": deltanet_heads(8, 8),
    "two_value_heads_a_key": deltanet_heads(4, 8) | heads(8, 2) | {"fused": True},
    "three_value_heads_a_key": deltanet_heads(2, 6) | heads(6, 3) | {"terse": True},
    "four_value_heads_a_key": deltanet_heads(3, 12) | heads(12, 4, 8),
    "one_head": deltanet_heads(1, 1) | heads(1, 1, 32) | {"linear_value_head_dim": 24},
    "five_heads": deltanet_heads(1, 5) | heads(5, 1) | {"linear_key_head_dim": 24, "linear_value_head_dim": 8},
    "odd_hidden": {"hidden_size": 37, "fused": True, "shared_expert_intermediate_size": 7} | heads(4, 4, 10),
    "two_narrow_leaves": {"hidden_size": 600} | deltanet_heads(2, 2) | layers("da"),
    "many_experts": MANY_EXPERTS,
    "top_one": {"num_experts": 5, "num_experts_per_tok": 1, "moe_intermediate_size": 24, "terse": True},
    "all_experts": {"num_experts": 6, "num_experts_per_tok": 6, "shared_expert_intermediate_size": 8},
    "tied": {"tie_word_embeddings": True, "fused": True},
    "biases": {"attention_bias": True},
    "whole_rotary": WHOLE_ROTARY | {"terse": True},
    "interval_two": {"full_attention_interval": 2, "terse": True} | NO_LAYER_TYPES,
}

CASES: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3_next": COMMON
    | {
        "not_renormalised": {"norm_topk_prob": False} | HALF_ROTARY,
        "dense_layers": {"mlp_only_layers": [0, 2], "linear_conv_kernel_dim": 3} | layers("adda"),
        "every_other_dense": {"decoder_sparse_step": 2, "linear_conv_kernel_dim": 2, "terse": True}
        | (TOP_LEVEL_ROPE | NO_LAYER_TYPES),
        "last_attention_of_five": {"rms_norm_eps": 1e-5, "linear_conv_kernel_dim": 5} | layers("dddda") | YARN,
    },
    "qwen3_5_moe": COMMON
    | {
        "wrapped": {"wrapped": True, "linear_conv_kernel_dim": 3} | layers("adda") | HALF_ROTARY,
        "wrapped_terse": {"wrapped": True, "terse": True, "fused": True, "vision_tensors": False} | MROPE,
        "wrapped_tied": {"wrapped": True, "tie_word_embeddings": True, "linear_conv_kernel_dim": 2} | LINEAR_ROPE,
        "top_level_rope": {"terse": True, "linear_conv_kernel_dim": 5} | TOP_LEVEL_ROPE | layers("dad"),
    },
    "qwen4_exp": {
        "base": {},
        "every_value_head_its_own_key": COMMON["every_value_head_its_own_key"]
        | {"hc_count": 2, "output_gate_type": "silu"},
        "two_value_heads_a_key": COMMON["two_value_heads_a_key"]
        | {"hc_count": 3, "whole_table": True, "indexer_n_heads": 3},
        "three_value_heads_a_key": COMMON["three_value_heads_a_key"] | {"wrapped": True, "output_gate_type": ...},
        "four_value_heads_a_key": COMMON["four_value_heads_a_key"]
        | {"ngram_size": 2, "heads_per_ngram": 4, "ngram_seed": 7},
        "one_head": COMMON["one_head"] | {"indexer_n_heads": 1, "indexer_budget": 8, "hc_lowrank": 1} | HALF_ROTARY,
        "five_heads": COMMON["five_heads"]
        | {"ngram_size": 4, "heads_per_ngram": 2, "ple_embed_dim": 18, "split_ngram_parts": 7},
        "odd_hidden": COMMON["odd_hidden"]
        | {"ple_embed_dim": 12, "hc_count": 2, "indexer_head_dim": 10, "indexer_compress_ratio": 1}
        | PARTIAL_ROTARY,
        "narrow_leaves": COMMON["two_narrow_leaves"]
        | {"hc_lowrank": 20, "hc_count": 2, "ple_layer_ids": [1], "indexer_budget": 15, "indexer_compress_ratio": 5},
        "leaves_of_streams": {"hidden_size": 150, "ple_embed_dim": 20, "split_ngram_parts": 1},
        "many_experts": MANY_EXPERTS | {"terse": True},
        "top_one": COMMON["top_one"] | {"indexer_compress_ratio": 2, "indexer_budget": 10, "split_ngram_parts": 8},
        "all_experts": COMMON["all_experts"] | {"indexer_budget": 256, "ngram_size": 2, "ple_embed_dim": 30},
        "tied": COMMON["tied"] | {"wrapped": True, "vision_tensors": False, "whole_table": True} | MROPE,
        "biases": COMMON["biases"] | {"indexer_n_heads": 4, "indexer_head_dim": 24, "eos_token_id": [3, 1]},
        "whole_rotary": COMMON["whole_rotary"]
        | {"indexer_head_dim": 20, "indexer_budget": 12, "indexer_compress_ratio": 3},
        "not_renormalised": {"norm_topk_prob": False, "wrapped": True, "terse": True, "fused": True},
        "two_tables": {"ple_layer_ids": [3, 1], "ngram_vocab_size_base": 97, "linear_conv_kernel_dim": 3}
        | layers("ddda"),
        "attention_first": layers("addad") | {"ple_layer_ids": [2, 3, 5], "ple_conv_kernel_size": 2, "terse": True},
        "no_table": {"ple_layer_ids": ..., "full_attention_interval": 2, "indexer_compress_ratio": 2, "terse": True}
        | NO_LAYER_TYPES,
    },
}

ALL_CASES = [(family, case) for family in CASES for case in CASES[family]]


def test_there_are_twenty_models_a_family() -> None:
    assert {family: len(cases) for family, cases in CASES.items()} == dict.fromkeys(FAMILIES, 20)


def prompts_of(seed: int, end_id: int) -> list[list[int]]:
    """A long one with end ids inside, one right behind another, sometimes at its end; and a short one, sometimes with
    an end id first."""
    generator = np.random.default_rng(seed)
    long = generator.integers(101, size=33 + 7 * seed % 38).tolist()
    for position in (11, 12, 14, 29, *([-1] if seed % 4 == 0 else [])):
        long[position] = end_id
    short = generator.integers(101, size=1 + seed % 3).tolist()
    if seed % 5 == 0:
        short[0] = end_id
    return [long, short]


def chunks_then_rows(references: list[Reference], prompts: list[list[int]]) -> list[list[Row]]:
    """The prompts' rows in chunks, the short one's with the first of the long one's; then one row of each a step."""
    steps = []
    for first in range(0, max(map(len, prompts)), CHUNK_ROWS):
        steps.append(_rows_between(prompts, [(first, first + CHUNK_ROWS)] * len(prompts)))
    for decoded in range(NUM_DECODED):
        firsts = [len(prompt) + decoded for prompt in prompts]
        tokens = [reference.token_ids[:-1] for reference in references]
        steps.append(_rows_between(tokens, [(first, first + 1) for first in firsts]))
    return steps


def _rows_between(prompts: list[list[int]], ranges: list[tuple[int, int]]) -> list[Row]:
    return [
        (prompt, position)
        for prompt, (first, stop) in enumerate(ranges)
        for position in range(first, min(stop, len(prompts[prompt])))
    ]


def hold_against_reference(folder: Path, family: str, wrapped: bool, seed: int, end_id: int) -> Comparison:
    model = load_reference(folder, model_class(family, wrapped))
    prompts = prompts_of(seed, end_id)
    nums_decoded = (NUM_DECODED, NUM_DECODED_OF_SHORT)
    references = [reference_run(model, prompt, num) for prompt, num in zip(prompts, nums_decoded, strict=True)]
    steps = chunks_then_rows(references, prompts)
    run = run_single(folder, [reference.token_ids[:-1] for reference in references], steps, "float32")
    return compare(references, run.logits, TOLERANCE)


@pytest.mark.parametrize(("family", "case"), ALL_CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, family: str, case: str) -> None:
    seed = list(CASES[family]).index(case)
    options = CASES[family][case]
    folder = write_family(tmp_path, family, seed, "float32", **options)
    end_ids = np.atleast_1d(options.get("eos_token_id", 1))
    comparison = hold_against_reference(folder, family, options.get("wrapped", False), seed, int(end_ids[0]))
    left_out = f"{comparison.num_left_out} rows left out, {comparison.num_compared} compared"
    assert comparison.num_left_out <= (comparison.num_compared + comparison.num_left_out) / 4, left_out


def test_the_first_end_id_of_the_text_config_alone_cuts_ngrams(tmp_path: Path) -> None:
    """generation_config.json may name others, which end a text."""
    folder = write_family(tmp_path, "qwen4_exp", 4, "float32", eos_token_id=[5, 7])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    prompt = np.random.default_rng(8).integers(101, size=15).tolist()
    prompt[3], prompt[7], prompt[11] = 7, 9, 5
    reference = reference_run(load_reference(folder, model_class("qwen4_exp", wrapped=False)), prompt)
    run = run_single(folder, [prompt], [_rows_between([prompt], [(0, len(prompt))])], "float32")
    assert compare([reference], run.logits, TOLERANCE).num_left_out == 0
