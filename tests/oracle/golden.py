"""Golden cases: inputs, what the oracle makes of them, and the record that is committed (hashes and first elements)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle import hyper
from oracle.attention import gated, paged_attention
from oracle.config import Config, DeltaNet, Hyper, Indexer, Ngram
from oracle.convolution import causal_convolution
from oracle.deltanet import deltanet
from oracle.experts import Expert, slot_values, swiglu
from oracle.functions import FUNCTIONS
from oracle.hash import residual_hash
from oracle.head import argmax
from oracle.indexer import pooled_keys, selected_keys
from oracle.inputs import I32, integers, numbers, permutation, weights
from oracle.linear import narrow_linear, row_split_leaves, wide
from oracle.model import Model
from oracle.ngram import stream_values
from oracle.norms import gated_norm, rms_norm
from oracle.parts import Parts
from oracle.rotary import frequencies, rotary
from oracle.rounding import DTYPES, F32, narrow, round_to
from oracle.router import route
from oracle.small_models import random_weights
from oracle.tree import tree_sum

Array = NDArray[Any]
Record = dict[str, Any]

NUM_FIRST = 4


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


@dataclass(frozen=True, slots=True)
class SmallModel:
    """A model whose logits are committed, in some compute dtypes."""

    config: Config
    token_ids: tuple[int, ...]
    dtypes: tuple[str, ...]

    def weights(self) -> dict[str, F32]:
        return random_weights(self.config, vocab_size=97, expert_size=24, seed="golden")


_MOE = Config(
    hidden_size=40, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=16, num_experts=20, top_k=4, rope_theta=1e6
)
_BLOCKS = replace(_MOE, num_experts=9, rotary_dim=8, offset_norms=True, query_gate=True, shared_expert=True)
_MANY_TOKENS = tuple(integers("tokens", 0, 97, (72,)).tolist())
MODELS = {
    "moe": SmallModel(_MOE, (5, 0, 96, 31, 31, 7, 64, 12, 80), DTYPES),
    "gated": SmallModel(
        replace(_BLOCKS, deltanet=DeltaNet((0,), 2, 6, 8, 12, fused_projections=True)), _MANY_TOKENS, ("float16",)
    ),
    "streams": SmallModel(
        replace(
            _BLOCKS,
            deltanet=DeltaNet((0,), 2, 4, 12, 10, output_gate="sigmoid"),
            indexer=Indexer(num_heads=3, head_dim=12, budget=24, block_size=4),
            hyper=Hyper(num_streams=3, low_rank=10),
            ngram=Ngram((0,), embed_dim=24, ngram_size=3, heads_per_ngram=2, vocab_base=40, end_id=31),
        ),
        _MANY_TOKENS,
        ("bfloat16",),
    ),
}


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
    made |= _stream_cases()
    for dtype in DTYPES:
        made[f"wide/{dtype}"] = Case("wide", _linear_arguments(dtype, 300))
        made[f"narrow/{dtype}"] = Case("narrow", _linear_arguments(dtype, 1100))
        made[f"row_split/{dtype}"] = Case("row_split", {**_linear_arguments(dtype, 96), "leaf_k": 24})
        made[f"experts/{dtype}"] = Case("experts", _expert_arguments(dtype))
        made[f"attention/{dtype}"] = Case("attention", _attention_arguments(dtype))
        made[f"attention_lists/{dtype}"] = Case("attention", _attention_arguments(dtype) | _list_arguments())
        made[f"deltanet/{dtype}"] = Case("deltanet", _deltanet_arguments(dtype))
        made[f"pooled_keys/{dtype}"] = Case("pooled_keys", _pooling_arguments(dtype))
        made[f"selected_keys/{dtype}"] = Case("selected_keys", _selection_arguments(dtype))
    return made


def model_records() -> dict[str, Record]:
    """The logits of the small models, by name and compute dtype."""
    return {
        f"model/{name}/{dtype}": record(
            Model(model.config, model.weights(), Parts(dtype)).forward(model.token_ids).logits
        )
        for name, model in MODELS.items()
        for dtype in model.dtypes
    }


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


def _list_arguments() -> dict[str, Any]:
    lists = [np.sort(permutation(f"list{row}", 257)[:70]) for row in range(3)]
    return {"selected": np.stack(lists).astype(np.int32), "counts": np.array([0, 70, 65], dtype=np.int32)}


def _stream_cases() -> dict[str, Case]:
    x, y, gate = (numbers(name, (4, 3 * 70), "mixed") for name in ("x", "y", "gate"))
    row, weight = numbers("row", (4, 70)), numbers("weight", (3, 70))
    by_group = {"x": x.reshape(4, 3, 70), "weight": weight}
    gated_rows = {"x": x, "gate": gate, "weight": numbers("weight", (210,))}
    return {
        "rms_norm/grouped": Case("rms_norm", by_group),
        "gated_norm/silu": Case("gated_norm", gated_rows | {"activation": "silu"}),
        "gated_norm/sigmoid": Case("gated_norm", gated_rows | {"activation": "sigmoid"}),
        "output_gate": Case("output_gate", {"x": x, "gate": gate}),
        "hyper/mixer_row": Case("mixer_row", {"x": x, "num_streams": 3}),
        "hyper/injection": Case("injection_weights", {"z": x, "num_streams": 3}),
        "hyper/mixed_row": Case("mixed_row", {"y": y, "normed": x, "num_streams": 3}),
        "hyper/written": Case("written_streams", {"streams": x, "output": row, "weights": numbers("w", (4, 3))}),
        "ngram_values": Case("stream_values", {"key_normed": x, "query_normed": y, "value": row, "scale": 0.1195}),
        "convolution": Case(
            "convolution", {"x": numbers("x", (17, 30)), "weight": numbers("w", (30, 4)), "dilation": 3}
        ),
    }


def _deltanet_arguments(dtype: str) -> dict[str, Any]:
    num_rows = 70
    return {
        "qkv": numbers("qkv", (num_rows, 2 * 2 * 12 + 3 * 20)),
        "b": numbers("b", (num_rows, 3)),
        "a": numbers("a", (num_rows, 3)),
        "a_log": numbers("a_log", (3,)),
        "dt_bias": numbers("dt_bias", (3,)) - np.float32(3),
        "key_index": np.array([0, 0, 1], dtype=np.int32),
        "num_key_heads": 2,
        "key_dim": 12,
        "scale": 0.29,
        "dtype": dtype,
    }


def _pooling_arguments(dtype: str) -> dict[str, Any]:
    frequency = frequencies(1e4, 8)
    rules = {"eps": 1e-6, "one_plus_weight": True, "frequency": frequency, "attention_factor": 1.0, "block_size": 4}
    return {"raw": numbers("raw", (50, 24)), "weight": numbers("weight", (24,)), **rules, "dtype": dtype}


def _selection_arguments(dtype: str) -> dict[str, Any]:
    return {
        "queries": numbers("queries", (5, 3, 24)),
        "positions": np.array([31, 35, 36, 98, 159], dtype=np.int32),
        "keys": numbers("keys", (40, 24)),
        "block_size": 4,
        "budget": 32,
        "scale": 0.204,
        "dtype": dtype,
    }


def _selected(queries: F32, positions: I32, keys: F32, block_size: int, budget: int, scale: float, dtype: str) -> I32:
    """The lists of all rows, one after another."""
    rules, rounded = (block_size, budget, scale, dtype), round_to(keys, dtype)
    lists = [selected_keys(row, rounded, int(at), *rules) or [] for row, at in zip(queries, positions, strict=True)]
    return np.array([key for of_row in lists for key in of_row], dtype=np.int32)


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
    "gated_norm": lambda x, gate, weight, activation: gated_norm(x, gate, weight, 1e-6, activation),
    "output_gate": lambda x, gate: gated(x, gate),
    "mixer_row": hyper.mixer_row,
    "injection_weights": hyper.injection_weights,
    "mixed_row": hyper.mixed_row,
    "written_streams": hyper.written_streams,
    "stream_values": stream_values,
    "convolution": causal_convolution,
    "deltanet": lambda **arguments: deltanet(**arguments).outputs,
    "pooled_keys": pooled_keys,
    "selected_keys": _selected,
}


def oracle_result(case: Case) -> Array:
    return np.asarray(ORACLE[case.operation](**case.arguments))
