"""Arithmetic of qwen3_moe against transformers in float64: small random models of every option that the family has."""

from pathlib import Path
from typing import Any

import pytest
import torch
from leafsum.ranks.configs.load import load_spec
from model_runs import run_single, whole
from reference_runs import ChoiceGaps, Comparison, compare, load_reference, reference_run
from tiny_checkpoints import Tensors, write_checkpoint
from transformers import Qwen3MoeForCausalLM

TOLERANCE = 3e-5
"""Of the largest logit."""

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 5e4}
NO_ROPE = {"rope_theta": ..., "rope_scaling": ...}

CASES: dict[str, dict[str, Any]] = {
    "base": {},
    "one_head": {"num_attention_heads": 1, "num_key_value_heads": 1},
    "six_heads_of_three": {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24},
    "every_head_its_own": {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32},
    "twelve_heads": {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 8},
    "derived_head_dim": {"head_dim": ..., "num_attention_heads": 4, "hidden_size": 64},
    "odd_hidden": {"hidden_size": 37, "head_dim": 10},
    "wide_narrow_leaves": {"hidden_size": 1100, "num_hidden_layers": 1},
    "thirteen_experts": {"num_experts": 13, "num_experts_per_tok": 3},
    "top_one": {"num_experts": 5, "num_experts_per_tok": 1},
    "all_experts": {"num_experts": 6, "num_experts_per_tok": 6},
    "many_experts": {"num_experts": 100, "num_experts_per_tok": 8, "moe_intermediate_size": 8},
    "not_renormalised": {"norm_topk_prob": False},
    "dense_first": {"mlp_only_layers": [0], "num_hidden_layers": 3},
    "every_other_dense": {"decoder_sparse_step": 2, "num_hidden_layers": 4},
    "biases": {"attention_bias": True},
    "tied": {"tie_word_embeddings": True},
    "linear_rope": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "yarn": {"rope_parameters": YARN, "max_position_embeddings": 256, **NO_ROPE},
    "version_5_names": {"num_experts": ..., "num_local_experts": 24, "rope_parameters": {"rope_theta": 2e4}, **NO_ROPE},
}


def prompts_of(vocab_size: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (num_rows,), generator=generator).tolist() for num_rows in (40, 9)]


def hold_against_reference(folder: Path, seed: int) -> Comparison:
    prompts = prompts_of(load_spec(folder).vocab_size, seed)
    model = load_reference(folder, Qwen3MoeForCausalLM)
    references = [reference_run(model, prompt) for prompt in prompts]
    run = run_single(folder, prompts, whole(prompts), "float32")
    return compare(references, run.logits, TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    seed = list(CASES).index(case)
    folder = write_checkpoint(tmp_path, seed=seed, dtype="float32", fused=bool(seed % 2), **CASES[case])
    comparison = hold_against_reference(folder, seed)
    assert comparison.num_left_out <= comparison.num_compared / 4, comparison


def test_near_ties_are_left_out_and_counted(tmp_path: Path) -> None:
    """Two experts with one router row: a true tie wherever it is the last place that they compete for."""

    def tie(tensors: Tensors) -> None:
        router = tensors["model.layers.1.mlp.gate.weight"]
        router[7] = router[3]

    folder = write_checkpoint(tmp_path, seed=1, dtype="float32", edit=tie)
    comparison = hold_against_reference(folder, 1)
    assert comparison.num_left_out > 0
    assert comparison.num_compared > 0


def test_an_indexer_takes_the_lower_of_equal_blocks_and_says_how_near_it_was() -> None:
    choices = ChoiceGaps(num_rows=4, num_indexers=1)
    with choices.noted():
        taken = [
            torch.tensor(scores).topk(2, dim=0).indices.tolist() for scores in ([0.0, 3.0, 0.0], [4.0, 1.0, 3.0, 1.0])
        ]
        torch.tensor([5.0, 5.0, 5.0]).topk(2, dim=0)
    assert taken == [[1, 0], [0, 2]]
    assert choices.of_rows().tolist() == [torch.inf, torch.inf, 0.5, 0.0]
