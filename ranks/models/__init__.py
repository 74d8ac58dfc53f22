"""Families: a name in config.json, and the file that wires blocks for it."""

from __future__ import annotations

from ..checkpoint import Checkpoint
from ..context import RankContext
from ..sizes import expected_tensors, ignored_prefixes
from ..spec import ModelSpec, check_num_ranks
from ..weights import WeightReader
from .causal import CausalModel, Residual
from .decoder import Decoder, Family
from .pre_norm import PRE_NORM
from .qwen4_exp import QWEN4_EXP

__all__ = ["FAMILIES", "CausalModel", "Residual", "build_model"]

FAMILIES: dict[str, Family] = {
    "qwen3_moe": PRE_NORM,
    "qwen3_next": PRE_NORM,
    "qwen3_5_moe": PRE_NORM,
    "qwen4_exp": QWEN4_EXP,
}


def build_model(spec: ModelSpec, checkpoint: Checkpoint, context: RankContext) -> CausalModel:
    """Read what this rank owns. Raises ModelError for tensors that do not fit, ConfigError for too many ranks."""
    check_num_ranks(spec, context.num_ranks)
    checkpoint.check(expected_tensors(spec, checkpoint.entries), ignored_prefixes(spec))
    with WeightReader(checkpoint, context.dtype) as reader:
        return Decoder(FAMILIES[spec.family], spec, reader, context)
