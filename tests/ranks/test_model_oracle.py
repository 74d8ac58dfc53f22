"""The whole model from its folder, bit for bit against the written-out contract in tests/oracle."""

from pathlib import Path
from typing import Any

import pytest
from contract_runs import assert_bits_of_the_contract
from model_runs import whole
from tiny_checkpoints import config_with, random_tensors, write_checkpoint

PROMPT = [3, 14, 15, 92, 65, 3]

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "biased_and_dense": {"attention_bias": True, "mlp_only_layers": [0], "num_experts": 13},
    "tied_not_renormalised": {"tie_word_embeddings": True, "norm_topk_prob": False, "rope_theta": 5e4},
    "several_narrow_leaves": {"hidden_size": 1040, "num_experts": 3, "num_experts_per_tok": 2, "num_hidden_layers": 1},
    "three_heads": {"num_attention_heads": 3, "num_key_value_heads": 1, "decoder_sparse_step": 2, "rms_norm_eps": 1e-3},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_the_contract(tmp_path: Path, case: str, dtype: str) -> None:
    """Weights are stored in FP32, so that what is rounded at load, and what is not, shows."""
    folder = write_checkpoint(tmp_path, dtype="float32", **CASES[case])
    weights = {name: tensor.numpy() for name, tensor in random_tensors(config_with(**CASES[case]), 0).items()}
    assert_bits_of_the_contract(folder, weights, PROMPT, dtype, whole([PROMPT]))
