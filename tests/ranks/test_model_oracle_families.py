"""Whole models of the families with DeltaNet, from their folders, bit for bit against the contract in tests/oracle."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bits import assert_same_bits
from family_checkpoints import write_family
from leafsum.ranks.configs.load import load_spec
from leafsum.ranks.spec import DELTANET, ModelSpec
from model_runs import Row, run_on_ranks, run_single, whole
from numpy.typing import NDArray
from oracle.config import Config, DeltaNet, Hyper, Indexer, Ngram
from oracle.inputs import integers
from oracle.model import Model
from oracle.parts import Parts
from safetensors.numpy import load_file

END_ID = 1
PROMPT = integers("prompt", 2, 101, (70,)).tolist()
PROMPT[20], PROMPT[41], PROMPT[42] = END_ID, END_ID, END_ID

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "next": ("qwen3_next", "bfloat16", {"mlp_only_layers": [1], "norm_topk_prob": False}),
    "3_5": ("qwen3_5_moe", "float16", {"linear_num_value_heads": 6, "num_hidden_layers": 3}),
    "exp": ("qwen4_exp", "bfloat16", {"ple_layer_ids": [1, 2]}),
    "exp in float32": (
        "qwen4_exp",
        "float32",
        {"layer_types": ["linear_attention", "indexed_attention"], "num_hidden_layers": 2, "ple_layer_ids": [1]},
    ),
}


def oracle_config(spec: ModelSpec) -> Config:
    deltanet, indexer, hyper, ngram = spec.deltanet, spec.indexer, spec.hyper, spec.ngram
    assert deltanet is not None
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
        mlp_only_layers=spec.dense_layers,
        rotary_dim=spec.rotary_dim,
        offset_norms=spec.offset_norms,
        query_gate=spec.query_gate,
        shared_expert=spec.shared_width > 0,
        deltanet=DeltaNet(
            spec.layers_of(DELTANET),
            deltanet.num_key_heads,
            deltanet.num_value_heads,
            deltanet.key_dim,
            deltanet.value_dim,
            deltanet.conv_taps,
            deltanet.output_gate,
            deltanet.fused_projections,
        ),
        indexer=indexer and Indexer(indexer.num_heads, indexer.head_dim, indexer.budget, indexer.block_size),
        hyper=hyper and Hyper(hyper.num_streams, hyper.low_rank),
        ngram=ngram
        and Ngram(
            ngram.layers,
            ngram.embed_dim,
            ngram.ngram_size,
            ngram.heads_per_ngram,
            ngram.vocab_base,
            ngram.end_id,
            ngram.conv_taps,
            ngram.seed,
        ),
    )


def chunks(num_rows: int) -> list[list[Row]]:
    """A prompt in two chunks and the rest row by row."""
    rows = whole([PROMPT])[0]
    return [rows[:29], rows[29:num_rows], *([row] for row in rows[num_rows:])]


@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_the_contract(tmp_path: Path, case: str) -> None:
    """Weights are stored in FP32, so that what is rounded at load, and what is not, shows."""
    family, dtype, changes = CASES[case]
    folder = write_family(tmp_path, family, whole_table=True, **changes)
    weights: dict[str, NDArray[np.float32]] = load_file(folder / "model.safetensors")
    expected = Model(oracle_config(load_spec(folder)), weights, Parts(dtype)).forward(PROMPT)
    single = run_single(folder, [PROMPT], whole([PROMPT]), dtype)
    assert_same_bits(single.residual, expected.residual)
    assert_same_bits(single.logits, expected.logits)
    split = run_on_ranks(folder, [PROMPT], chunks(62), dtype, 3, "nodes", "contiguous")
    assert_same_bits(split.residual, expected.residual)
    assert_same_bits(split.logits, expected.logits)
