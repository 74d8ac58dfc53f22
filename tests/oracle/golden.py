"""Golden cases: inputs, what the oracle makes of them, and the record that is committed (hashes and first elements)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.attention import paged_attention
from oracle.experts import Expert, slot_values, swiglu
from oracle.functions import FUNCTIONS
from oracle.hash import residual_hash
from oracle.head import argmax
from oracle.inputs import I32, integers, numbers, permutation, weights
from oracle.linear import narrow_linear, row_split_leaves, wide
from oracle.model import Config, Qwen3Moe
from oracle.norms import rms_norm
from oracle.rotary import frequencies, rotary
from oracle.rounding import DTYPES, F32, narrow
from oracle.router import route
from oracle.small_models import random_weights
from oracle.tree import tree_sum

Array = NDArray[Any]
Record = dict[str, Any]

NUM_FIRST = 4
MODEL_TOKENS = (5, 0, 96, 31, 31, 7, 64, 12, 80)
MODEL_CONFIG = Config(
    hidden_size=40, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=16, num_experts=20, top_k=4, rope_theta=1e6
)


@dataclass(frozen=True, slots=True)
class Case:
    """operation names what is done, arguments are its inputs by name."""

    operation: str
    arguments: dict[str, Any]


def record(result: Array) -> Record:
    """What is committed of a result: type, SHA-256 of its little-endian bytes, first elements in hex."""
    bits = np.ascontiguousarray(result).view(f"<u{result.dtype.itemsize}").reshape(result.shape)
    first = [f"{int(value):0{2 * result.dtype.itemsize}x}" for value in bits.flat[:NUM_FIRST]]
    digest = hashlib.sha256(bits.tobytes()).hexdigest()
    return {"dtype": str(result.dtype), "shape": list(result.shape), "sha256": digest, "first": first}


def small_model_weights() -> dict[str, F32]:
    return random_weights(MODEL_CONFIG, vocab_size=97, expert_size=24, seed="golden")


def cases() -> dict[str, Case]:
    """Every case by name; a name never changes its meaning."""
    made = {f"function/{name}": Case(name, {"x": numbers(f"golden/{name}", (1000,), "mixed")}) for name in FUNCTIONS}
    made["rms_norm"] = Case("rms_norm", {"x": numbers("x", (3, 200), "mixed"), "weight": numbers("weight", (200,))})
    made["swiglu"] = Case("swiglu", {"gate": numbers("gate", (4, 50)), "up": numbers("up", (4, 50))})
    made["rotary"] = Case("rotary", _rotary_arguments())
    made["router"] = Case("router", {"logits": numbers("logits", (6, 64)), "top_k": 8})
    made["router/tied"] = Case("router", {"logits": numbers("logits", (6, 64), "tied"), "top_k": 8})
    made["argmax"] = Case("argmax", {"logits": numbers("logits", (6, 300), "tied")})
    made["tree"] = Case("tree", _tree_arguments())
    hashed = {"x": numbers("x", (4, 48), "mixed"), "positions": integers("positions", 0, 4096, (4,))}
    made["residual_hash"] = Case("residual_hash", hashed)
    for dtype in DTYPES:
        made[f"wide/{dtype}"] = Case("wide", _linear_arguments(dtype, 300))
        made[f"narrow/{dtype}"] = Case("narrow", _linear_arguments(dtype, 1100))
        made[f"row_split/{dtype}"] = Case("row_split", {**_linear_arguments(dtype, 96), "leaf_k": 24})
        made[f"experts/{dtype}"] = Case("experts", _expert_arguments(dtype))
        made[f"attention/{dtype}"] = Case("attention", _attention_arguments(dtype))
    return made


def model_records() -> dict[str, Record]:
    """The logits of the small model, by compute dtype."""
    forwards = {dtype: Qwen3Moe(MODEL_CONFIG, small_model_weights(), dtype).forward(MODEL_TOKENS) for dtype in DTYPES}
    return {f"model/{dtype}": record(forward.logits) for dtype, forward in forwards.items()}


def _rotary_arguments() -> dict[str, Any]:
    positions = integers("positions", 0, 40_000, (5,))
    return {"x": numbers("x", (5, 2, 64)), "positions": positions, "frequency": frequencies(1e6, 64)}


def _tree_arguments() -> dict[str, Any]:
    ids = np.stack([np.sort(permutation(f"ids{row}", 51)[:9]) for row in range(4)]).astype(np.int32)
    return {"slot_rows": numbers("rows", (4, 9, 24), "mixed"), "slot_ids": ids, "num_ids": 50}


def _linear_arguments(dtype: str, num_k: int) -> dict[str, Any]:
    return {"x": numbers("x", (3, num_k)), "weight": weights("weight", (20, num_k), dtype), "dtype": dtype}


def _expert_arguments(dtype: str) -> dict[str, Any]:
    shapes = {"gate": (18, 24), "up": (18, 24), "down": (24, 18)}
    experts = [
        Expert(**{part: weights(f"{part}{i}", shape, dtype) for part, shape in shapes.items()}) for i in range(5)
    ]
    ids = np.stack([np.sort(permutation(f"ids{row}", 5)[:3]) for row in range(4)]).astype(np.int32)
    inputs = {"x": numbers("x", (4, 24)), "slot_weights": numbers("weights", (4, 3))}
    return {**inputs, "slot_ids": ids, "experts": experts, "dtype": dtype}


def _attention_arguments(dtype: str) -> dict[str, Any]:
    return {
        "q": numbers("q", (3, 2, 16)),
        "key_pages": narrow(numbers("keys", (40, 1, 16, 16)), dtype),
        "value_pages": narrow(numbers("values", (40, 1, 16, 16)), dtype),
        "page_table": permutation("pages", 40).astype(np.int32).reshape(2, 20),
        "row_slots": np.array([1, 0, 1], dtype=np.int32),
        "row_num_keys": np.array([1, 257, 300], dtype=np.int32),
        "kv_index": np.array([0, 0], dtype=np.int32),
        "scale": 0.25,
        "dtype": dtype,
    }


def _experts(x: F32, slot_weights: F32, slot_ids: I32, experts: list[Expert], dtype: str) -> F32:
    out = np.zeros((*slot_ids.shape, x.shape[1]), dtype=np.float32)
    slot_values(x, slot_ids, slot_weights, experts, dtype, out)
    return out


ORACLE: dict[str, Callable[..., Any]] = {
    **FUNCTIONS,
    "rms_norm": lambda x, weight: rms_norm(x, weight, 1e-6),
    "swiglu": swiglu,
    "rotary": rotary,
    "router": lambda logits, top_k: route(logits, top_k, True)[1],
    "argmax": lambda logits: argmax(logits)[1],
    "tree": tree_sum,
    "residual_hash": residual_hash,
    "wide": wide,
    "narrow": narrow_linear,
    "row_split": row_split_leaves,
    "experts": _experts,
    "attention": paged_attention,
}


def oracle_result(case: Case) -> Array:
    return np.asarray(ORACLE[case.operation](**case.arguments))
