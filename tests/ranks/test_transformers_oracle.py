"""Arithmetic against transformers in float64: small random models of every option that the family has.

A row whose router is nearly undecided in the reference may rightly go to another expert in FP32, and whatever attends
to it follows. So a row is left out when, in any layer, its last chosen and first refused expert differ by less than
NEAR_TIE of the chosen one's probability, and so are all later rows of its prompt; what is left out is counted.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from leafsum.ranks.spec import load_spec
from model_runs import run_single, whole
from numpy.typing import NDArray
from tiny_checkpoints import Tensors, write_checkpoint
from transformers import Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

NEAR_TIE = 2e-5
TOLERANCE = 3e-5
"""Of the largest logit. The reference itself computes norms, rotary and softmax in FP32."""

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


@dataclass(frozen=True)
class Reference:
    """logits float64 [rows, V]; gaps [rows]: the least relative gap of a row's routers."""

    logits: NDArray[np.float64]
    gaps: NDArray[np.float64]


def reference_run(folder: Path, prompt: list[int]) -> Reference:
    model = Qwen3MoeForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    gaps = [torch.full((len(prompt),), torch.inf, dtype=torch.float64)]

    def note_gap(router: Qwen3MoeTopKRouter, _: Any, output: tuple[torch.Tensor, ...]) -> None:
        probabilities = output[0].softmax(dim=-1).sort(dim=-1, descending=True).values
        if router.top_k < probabilities.shape[1]:
            chosen, refused = probabilities[:, router.top_k - 1], probabilities[:, router.top_k]
            gaps.append((chosen - refused) / chosen)

    for module in model.modules():
        if isinstance(module, Qwen3MoeTopKRouter):
            module.register_forward_hook(note_gap)
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0]
    assert logits.dtype == torch.float64
    return Reference(logits.numpy(), torch.stack(gaps).amin(dim=0).numpy())


def rows_to_compare(gaps: NDArray[np.float64]) -> int:
    """Rows before the first near-tie."""
    near_ties = np.flatnonzero(gaps < NEAR_TIE)
    return int(near_ties[0]) if near_ties.size else len(gaps)


def prompts_of(vocab_size: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (num_rows,), generator=generator).tolist() for num_rows in (40, 9)]


def compare(folder: Path, seed: int) -> tuple[int, int]:
    """Holds one model against the reference; the numbers of rows compared and left out."""
    prompts = prompts_of(load_spec(folder).vocab_size, seed)
    run = run_single(folder, prompts, whole(prompts), "float32")
    num_compared = first_row = 0
    for prompt in prompts:
        reference = reference_run(folder, prompt)
        num_rows = rows_to_compare(reference.gaps)
        expected, found = reference.logits[:num_rows], run.logits[first_row : first_row + num_rows]
        first_row += len(prompt)
        num_compared += num_rows
        if num_rows == 0:
            continue
        scale = np.abs(reference.logits).max()
        assert np.abs(found - expected).max() < TOLERANCE * scale
        best_two = np.sort(expected, axis=1)[:, -2:]
        is_clear = best_two[:, 1] - best_two[:, 0] > 2 * TOLERANCE * scale
        assert is_clear.mean() > 0.9
        assert (found.argmax(axis=1) == expected.argmax(axis=1))[is_clear].all()
    return num_compared, first_row - num_compared


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    seed = list(CASES).index(case)
    folder = write_checkpoint(tmp_path, seed=seed, dtype="float32", fused=bool(seed % 2), **CASES[case])
    num_compared, num_left_out = compare(folder, seed)
    assert num_left_out <= num_compared / 4, f"{num_left_out} rows left out, {num_compared} compared"


def test_near_ties_are_left_out_and_counted(tmp_path: Path) -> None:
    """Two experts with one router row: a true tie wherever it is the last place that they compete for."""

    def tie(tensors: Tensors) -> None:
        router = tensors["model.layers.1.mlp.gate.weight"]
        router[7] = router[3]

    folder = write_checkpoint(tmp_path, seed=1, dtype="float32", edit=tie)
    num_compared, num_left_out = compare(folder, 1)
    assert num_left_out > 0
    assert num_compared > 0
