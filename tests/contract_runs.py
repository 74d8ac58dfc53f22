"""Whole models from their folders, held bit for bit against the written-out contract in tests/oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from bits import assert_same_bits
from leafsum.ranks.configs.load import load_spec
from leafsum.ranks.spec import DELTANET, ModelSpec
from model_runs import Row, run_on_ranks, run_single, whole
from numpy.typing import NDArray
from oracle.config import Config, DeltaNet, Hyper, Indexer, Ngram
from oracle.model import Model
from oracle.parts import Parts


def assert_bits_of_the_contract(
    folder: Path,
    weights: Mapping[str, NDArray[np.float32]],
    prompt: Sequence[int],
    dtype: str,
    steps_on_ranks: Sequence[Sequence[Row]],
) -> None:
    """One rank takes the prompt whole, three take it in steps."""
    expected = Model(oracle_config(load_spec(folder)), weights, Parts(dtype)).forward(prompt)
    single = run_single(folder, [prompt], whole([prompt]), dtype)
    assert_same_bits(single.residual, expected.residual)
    assert_same_bits(single.logits, expected.logits)
    split = run_on_ranks(folder, [prompt], steps_on_ranks, dtype, 3, "nodes", "contiguous")
    assert_same_bits(split.residual, expected.residual)
    assert_same_bits(split.logits, expected.logits)


def oracle_config(spec: ModelSpec) -> Config:
    deltanet, indexer, hyper, ngram = spec.deltanet, spec.indexer, spec.hyper, spec.ngram
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
        rotary_dim=spec.rotary_dim,
        offset_norms=spec.offset_norms,
        query_gate=spec.query_gate,
        shared_expert=spec.shared_width > 0,
        deltanet=deltanet
        and DeltaNet(
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
