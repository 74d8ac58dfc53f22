"""Committed bits: the oracle and the kernels are both held to golden.json, on every machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from csrc.one_sequence import convolution, deltanet, pooled_keys, select_keys
from leafsum import _C
from machines import machines
from oracle.experts import Expert
from oracle.functions import FUNCTIONS
from oracle.golden import cases, model_records, oracle_result, record
from oracle.inputs import F32, I32
from oracle.linear import NARROW_LEAF_K
from oracle.rounding import Storage

GOLDEN: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("golden.json").read_text())
CASES = cases()


def linear(x: F32, weight: Storage, dtype: str, leaf_k: int) -> F32:
    return _C.linear(x, _C.pack_weight(weight, dtype), dtype, weight.shape[0], leaf_k, None)


def row_split(x: F32, weight: Storage, dtype: str, leaf_k: int) -> F32:
    return _C.linear_leaves(x, _C.pack_weight(weight, dtype), dtype, weight.shape[0], leaf_k)


def experts(x: F32, slot_weights: F32, slot_ids: I32, experts: list[Expert], dtype: str) -> F32:
    out = np.zeros((*slot_ids.shape, x.shape[1]), dtype=np.float32)
    gate, up, down = (
        np.stack([_C.pack_weight(getattr(expert, part), dtype) for expert in experts])
        for part in ("gate", "up", "down")
    )
    everyone = np.arange(len(experts), dtype=np.int32)
    _C.experts(x, slot_ids, slot_weights, gate, up, down, everyone, dtype, out)
    return out


def tree(slot_rows: F32, slot_ids: I32, num_ids: int) -> F32:
    no_nodes, no_rows = np.zeros(0, dtype=np.int32), np.zeros((len(slot_rows), 0, slot_rows.shape[2]), dtype=np.float32)
    return _C.tree_nodes(slot_rows, slot_ids, num_ids, 8, True, no_nodes, no_rows, np.array([1], dtype=np.int32))[:, 0]


def selected_keys(
    queries: F32, positions: I32, keys: F32, block_size: int, budget: int, scale: float, dtype: str
) -> I32:
    """The lists of all rows, one after another."""
    padded = np.zeros((-len(keys) % 16 + len(keys), keys.shape[1]), dtype=np.float32)
    padded[: len(keys)] = keys
    pages = _C.narrow(np.ascontiguousarray(padded.reshape(-1, 16, keys.shape[1]).swapaxes(1, 2)), dtype)
    selected, counts = select_keys(queries, pages, positions, block_size, budget, scale, dtype)
    return np.concatenate([row[:count] for row, count in zip(selected, counts, strict=True)])


KERNELS: dict[str, Callable[..., Any]] = {
    **{name: getattr(_C, name) for name in FUNCTIONS},
    "rms_norm": lambda x, weight: _C.rms_norm(x, weight, 1e-6, False),
    "gated_norm": lambda x, gate, weight, activation: _C.gated_norm(x, gate, weight, 1e-6, activation),
    "output_gate": _C.sigmoid_times,
    "mixer_row": lambda x, num_streams: _C.hyper_gates(x, num_streams, x.shape[1])[0],
    "injection_weights": lambda z, num_streams: _C.hyper_gates(z, num_streams, 0)[1],
    "mixed_row": _C.hyper_mix,
    "written_streams": lambda streams, output, weights: _C.hyper_write(streams, output, weights),
    "stream_values": _C.ngram_values,
    "convolution": convolution,
    "deltanet": deltanet,
    "pooled_keys": lambda raw, **rules: pooled_keys(raw, *rules.values()),
    "selected_keys": selected_keys,
    "swiglu": _C.swiglu,
    "rotary": lambda x, positions, frequency: _C.rotary(x, positions, frequency, 1.0),
    "router": lambda logits, top_k: _C.router(logits, top_k, True)[1],
    "argmax": lambda logits: _C.argmax(logits)[1],
    "tree": tree,
    "residual_hash": _C.residual_hash,
    "wide": lambda x, weight, dtype: linear(x, weight, dtype, 0),
    "narrow": lambda x, weight, dtype: linear(x, weight, dtype, NARROW_LEAF_K),
    "row_split": row_split,
    "experts": experts,
    "attention": _C.attention,
}


@pytest.mark.parametrize("name", CASES)
def test_oracle_keeps_its_bits(name: str) -> None:
    assert record(oracle_result(CASES[name])) == GOLDEN[name]


@pytest.mark.parametrize("name", CASES)
def test_kernels_have_golden_bits(name: str) -> None:
    case = CASES[name]
    for where in machines():
        assert record(np.asarray(KERNELS[case.operation](**case.arguments))) == GOLDEN[name], where


def test_oracle_model_keeps_its_bits() -> None:
    records = model_records()
    assert records == {name: GOLDEN[name] for name in records}


def test_no_record_is_left_over() -> None:
    assert {name for name in GOLDEN if not name.startswith("model/")} == set(CASES)
