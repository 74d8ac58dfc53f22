"""The whole model from its folder, bit for bit against the written-out contract in tests/oracle."""

from pathlib import Path
from typing import Any

import pytest
from bits import assert_same_bits
from leafsum.ranks.configs.load import load_spec
from leafsum.ranks.spec import ModelSpec
from model_runs import run_on_ranks, run_single, whole
from oracle.config import Config
from oracle.model import Model
from oracle.parts import Parts
from tiny_checkpoints import config_with, random_tensors, write_checkpoint

PROMPT = [3, 14, 15, 92, 65, 3]

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "biased_and_dense": {"attention_bias": True, "mlp_only_layers": [0], "num_experts": 13},
    "tied_not_renormalised": {"tie_word_embeddings": True, "norm_topk_prob": False, "rope_theta": 5e4},
    "several_narrow_leaves": {"hidden_size": 1040, "num_experts": 3, "num_experts_per_tok": 2, "num_hidden_layers": 1},
    "three_heads": {"num_attention_heads": 3, "num_key_value_heads": 1, "decoder_sparse_step": 2, "rms_norm_eps": 1e-3},
}


def oracle_config(spec: ModelSpec) -> Config:
    return Config(
        hidden_size=spec.hidden_size,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        rms_norm_eps=spec.rms_norm_eps,
        rope_theta=spec.rope.theta,
        norm_topk_prob=spec.renormalise,
        tie_word_embeddings=spec.tied_embeddings,
        mlp_only_layers=spec.dense_layers,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_the_contract(tmp_path: Path, case: str, dtype: str) -> None:
    """Weights are stored in FP32, so that what is rounded at load, and what is not, shows."""
    folder = write_checkpoint(tmp_path, dtype="float32", **CASES[case])
    weights = {name: tensor.numpy() for name, tensor in random_tensors(config_with(**CASES[case]), 0).items()}
    expected = Model(oracle_config(load_spec(folder)), weights, Parts(dtype)).forward(PROMPT)
    single = run_single(folder, [PROMPT], whole([PROMPT]), dtype)
    assert_same_bits(single.residual, expected.residual)
    assert_same_bits(single.logits, expected.logits)
    split = run_on_ranks(folder, [PROMPT], whole([PROMPT]), dtype, 3, "nodes", "contiguous")
    assert_same_bits(split.residual, expected.residual)
    assert_same_bits(split.logits, expected.logits)
