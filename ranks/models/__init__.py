"""Families: a name in config.json, and the class that wires blocks for it."""

from __future__ import annotations

from collections.abc import Callable

from ..checkpoint import Checkpoint
from ..context import RankContext
from ..sizes import expected_tensors
from ..spec import ModelSpec, check_num_ranks
from ..weights import WeightReader
from .causal import CausalModel, Residual
from .qwen3_moe import Qwen3Moe

__all__ = ["BUILDERS", "CausalModel", "Residual", "build_model"]

BUILDERS: dict[str, Callable[[ModelSpec, WeightReader, RankContext], CausalModel]] = {"qwen3_moe": Qwen3Moe}


def build_model(spec: ModelSpec, checkpoint: Checkpoint, context: RankContext) -> CausalModel:
    """Read what this rank owns. Raises ModelError for tensors that do not fit, ConfigError for too many ranks."""
    check_num_ranks(spec, context.num_ranks)
    checkpoint.check(expected_tensors(spec, checkpoint.entries))
    with WeightReader(checkpoint, context.dtype) as reader:
        return BUILDERS[spec.family](spec, reader, context)
