"""A small model of each family with every block it can have and hazards in its weights; prompts that try them all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from family_checkpoints import write_family
from leafsum.collectives.transport import SingleRank
from leafsum.ranks.models import CausalModel
from model_runs import Run, build, one_by_one, run_steps, whole
from oracle.inputs import integers
from tiny_checkpoints import Tensors

MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"mlp_only_layers": [1], "norm_topk_prob": False},
    "qwen3_5_moe": {"linear_num_value_heads": 6},
    "qwen4_exp": {"ple_layer_ids": [1, 2]},
}
DTYPES = ("float32", "bfloat16", "float16")
NUM_EXPERTS = 13
VOCAB_SIZE = 101
END_ID = 1
NEGATIVE_ZERO_ID, TINY_ID = 7, 8
"""Tokens whose embedding is -0.0, and subnormal."""
LENGTHS = (135, 1, 2, 3, 67)
"""Of the prompts: over DeltaNet's borders and the indexer's budget, or shorter than a convolution."""


def tokens_of(name: str, length: int) -> list[int]:
    """Any tokens but the end id."""
    return integers(f"tokens {name}", END_ID + 1, VOCAB_SIZE, (length,)).tolist()


def prompts() -> list[list[int]]:
    """End ids at the start and end of a prompt, next to each other and on both sides of a border."""
    drawn = [tokens_of(str(index), length) for index, length in enumerate(LENGTHS)]
    for index, position in [(0, 9), (0, 10), (0, 63), (0, 65), (0, 127), (0, 134), (2, 0), (3, 1), (4, 66)]:
        drawn[index][position] = END_ID
    drawn[4][3:6] = [NEGATIVE_ZERO_ID, TINY_ID, NEGATIVE_ZERO_ID]
    return drawn


def hazards(tensors: Tensors) -> None:
    """Ties of every router, zeros of both signs and subnormals in all kinds of linears, experts that cancel."""
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            tensor[7:10] = tensor[2:5]
            tensor[11:13] = -0.0
        elif name.endswith("experts.down_proj"):
            tensor[4].mul_(1e-40)
            tensor[8].mul_(300.0)
            tensor[5].copy_(-tensor[8])
        elif name.endswith(("o_proj.weight", "out_proj.weight")):
            tensor[:8].mul_(1e-39)
        elif name.endswith(("shared_expert.down_proj.weight", "value_proj.weight")):
            tensor[3].fill_(-0.0)
        elif name.endswith("conv1d.weight"):
            tensor[0].fill_(-0.0)
            tensor[1].mul_(1e-39)
        elif name.endswith("embed_tokens.weight"):
            tensor[NEGATIVE_ZERO_ID].fill_(-0.0)
            tensor[TINY_ID].mul_(1e-39)


def write_property_model(folder: Path, family: str, **changes: Any) -> Path:
    """`changes` of fields, and arguments of write_family."""
    fields = {"num_experts": NUM_EXPERTS, "edit": hazards} | MODELS[family] | changes
    return write_family(folder, family, **fields)


@dataclass(frozen=True)
class PropertyModels:
    """Of each family: its folder, written once, its model on one rank, and the run that all others must equal."""

    root: Path

    @cache  # noqa: B019 (one object for each test file, which needs all of them until it ends)
    def folder(self, family: str) -> Path:
        return write_property_model(self.root / family, family)

    @cache  # noqa: B019
    def single(self, family: str, dtype: str) -> CausalModel:
        return build(self.folder(family), SingleRank(), dtype)

    @cache  # noqa: B019
    def one_by_one(self, family: str, dtype: str) -> Run:
        """A row a step, one prompt after the other."""
        return finite(run_steps(self.single(family, dtype), prompts(), one_by_one(prompts())))

    @cache  # noqa: B019
    def whole(self, family: str, dtype: str) -> Run:
        """All rows in one step."""
        return finite(run_steps(self.single(family, dtype), prompts(), whole(prompts())))


def finite(run: Run) -> Run:
    """The same; memory starts as NaN, and a NaN would equal any other."""
    assert torch.from_numpy(run.residual).isfinite().all()
    assert torch.from_numpy(run.logits).isfinite().all()
    assert set(run.first_bad_layers) == {-1}
    return run
