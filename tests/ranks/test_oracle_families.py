"""The written-out contract against transformers in float64, for the families whose blocks the page adds to qwen3_moe.

This holds the page itself: what it says is the model, up to rounding. Nothing of the product takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from oracle import config as oracle_config
from oracle.indexer import block_scores, pooled_keys
from oracle.model import Model
from oracle.parts import Lists, Parts
from oracle.rounding import inverse_sqrt
from transformers import PreTrainedModel
from transformers.models.qwen3_5_moe import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.models.qwen3_next import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen4_exp import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

NUM_TOKENS = 150
VOCAB_SIZE = 61
END_ID = 7
THETA = 5e4
TOLERANCE = 1e-5
"""Of the largest logit. The reference itself computes norms, rotary, softmax and the delta rule in FP32."""
NEAR_TIE = 1e-5
"""Where a choice of the reference is closer than this, FP32 may rightly choose otherwise."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 40,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "num_experts": 11,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
    "rope_parameters": {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.25},
    "eos_token_id": END_ID,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
LINEAR, FULL, INDEXED = "linear_attention", "full_attention", "indexed_attention"


def deltanet_sizes(num_key_heads: int, num_value_heads: int, key_dim: int, value_dim: int) -> dict[str, int]:
    return {
        "linear_num_key_heads": num_key_heads,
        "linear_num_value_heads": num_value_heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
    }


REFERENCES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3_next": lambda: Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **SIZES,
            **deltanet_sizes(2, 6, 12, 20),
            num_hidden_layers=3,
            layer_types=[LINEAR, FULL, LINEAR],
            mlp_only_layers=[1],
            intermediate_size=28,
            norm_topk_prob=False,
        )
    ),
    "qwen3_5_moe": lambda: Qwen3_5MoeForCausalLM(
        Qwen3_5MoeTextConfig(**SIZES, **deltanet_sizes(3, 3, 16, 8), num_hidden_layers=2, layer_types=[LINEAR, FULL])
    ),
    "qwen4_exp": lambda: Qwen4ExpForCausalLM(
        Qwen4ExpTextConfig(
            **SIZES,
            **deltanet_sizes(2, 4, 8, 12),
            num_hidden_layers=4,
            layer_types=[LINEAR, LINEAR, INDEXED, LINEAR],
            output_gate_type="sigmoid",
            hc_count=3,
            hc_lowrank=9,
            ple_layer_ids=[2, 4],
            ple_embed_dim=24,
            ple_conv_kernel_size=4,
            ngram_size=3,
            heads_per_ngram=3,
            ngram_vocab_size_base=50,
            make_ngram_vocab_size_divisible_by=16,
            indexer_n_heads=6,
            indexer_kv_heads=1,
            indexer_head_dim=10,
            indexer_budget=36,
            indexer_compress_ratio=4,
        )
    ),
}


def oracle_sizes(config: Any) -> oracle_config.Config:
    layers = [layer for layer, kind in enumerate(config.layer_types) if kind == LINEAR]
    is_next, is_exp = config.model_type == "qwen3_next", config.model_type == "qwen4_exp_text"
    return oracle_config.Config(
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        rope_theta=THETA,
        norm_topk_prob=not is_next,
        mlp_only_layers=(1,) if is_next else (),
        rotary_dim=config.head_dim // 4,
        offset_norms=True,
        query_gate=True,
        shared_expert=True,
        deltanet=oracle_config.DeltaNet(
            layers=tuple(layers),
            num_key_heads=config.linear_num_key_heads,
            num_value_heads=config.linear_num_value_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            output_gate="sigmoid" if is_exp else "silu",
            fused_projections=is_next,
        ),
        indexer=oracle_config.Indexer(num_heads=6, head_dim=10, budget=36, block_size=4) if is_exp else None,
        hyper=oracle_config.Hyper(num_streams=3, low_rank=9) if is_exp else None,
        ngram=oracle_config.Ngram((1, 3), 24, 3, 3, vocab_base=50, end_id=END_ID) if is_exp else None,
    )


@torch.no_grad()
def randomise(model: PreTrainedModel, seed: int) -> dict[str, F32]:
    """FP32 values for every parameter, so that activations stay near one; the weights as the oracle takes them."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if name.endswith("A_log"):
            values = values / 2
        elif name.endswith("dt_bias"):
            values = values - 3
        elif parameter.ndim == 1:
            values = 0.2 * values + (1.0 if name.endswith("linear_attn.norm.weight") else 0.0)
        elif "embed" not in name:
            values = values * 1.5 / parameter.shape[-1] ** 0.5
        parameter.copy_(values)
    tensors = {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}
    model.double()
    return dict(single_experts(tensors))


def single_experts(tensors: dict[str, F32]) -> Iterator[tuple[str, F32]]:
    for name, tensor in tensors.items():
        prefix, is_fused, part = name.partition(".experts.")
        if not is_fused:
            yield name, tensor
            continue
        part_names = ("down_proj",) if part == "down_proj" else ("gate_proj", "up_proj")
        for expert, rows in enumerate(tensor):
            for part_name, values in zip(part_names, np.split(rows, len(part_names)), strict=True):
                yield f"{prefix}.experts.{expert}.{part_name}.weight", values


class WatchedParts(Parts):
    """Notes how clear the indexers' choices were, relative to the last block chosen."""

    def __init__(self, dtype: str) -> None:
        super().__init__(dtype)
        self.gaps: list[float] = []

    def key_lists(self, *arguments: Any) -> Lists:
        queries, raw_keys, norm, eps, frequency, block_size, budget = arguments
        keys = pooled_keys(raw_keys, norm, eps, True, frequency, 1.0, block_size, self.dtype)
        num_chosen = budget // block_size
        for position, row in enumerate(queries):
            num_blocks = (position + 1) // block_size
            if num_blocks > num_chosen:
                scores = block_scores(row, keys[:num_blocks], float(inverse_sqrt(keys.shape[1])), self.dtype)
                refused, chosen = np.sort(scores)[-num_chosen - 1 : -num_chosen + 1 or None]
                self.gaps.append(float((chosen - refused) / chosen))
        return super().key_lists(*arguments)


def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> tuple[F64, list[float]]:
    """The logits, and of every router and row the relative gap between its last chosen and first refused expert."""
    gaps: list[float] = []

    def note_gaps(router: Any, _: Any, output: tuple[torch.Tensor, ...]) -> None:
        best = output[0].softmax(dim=-1).sort(dim=-1, descending=True).values
        gaps.extend((1 - best[:, router.top_k] / best[:, router.top_k - 1]).tolist())

    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(note_gaps)
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0]
    assert logits.dtype == torch.float64
    return logits.numpy(), gaps


def tokens() -> list[int]:
    """The end id among them, alone and twice in a row."""
    ids = torch.randint(VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(5)).tolist()
    ids[20], ids[50], ids[51] = END_ID, END_ID, END_ID
    return ids


@pytest.mark.parametrize("family", REFERENCES)
def test_the_page_is_the_model(family: str) -> None:
    model = REFERENCES[family]().eval()
    weights = randomise(model, seed=3)
    expected, router_gaps = reference_logits(model, tokens())
    parts = WatchedParts("float32")
    found = Model(oracle_sizes(model.config), weights, parts).forward(tokens()).logits
    assert min(router_gaps + parts.gaps) > NEAR_TIE, "another seed: this one leaves a choice to rounding"
    assert bool(parts.gaps) == (family == "qwen4_exp")
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error < TOLERANCE
