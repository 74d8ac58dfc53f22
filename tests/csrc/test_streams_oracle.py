"""Kernels of hyper-connections, of the n-gram embedding's gate and of output gates are the oracle's."""

from __future__ import annotations

import numpy as np
import pytest
from bits import assert_same_bits
from leafsum import _C
from machines import machines
from oracle import hyper
from oracle.attention import gated
from oracle.inputs import KINDS, numbers
from oracle.ngram import stream_values
from oracle.norms import gated_norm, grouped_rms_norm, rms_norm
from oracle.rounding import inverse_sqrt

NUM_ROWS = 6
SHAPES = [(1, 5), (2, 64), (3, 70), (4, 129)]
"""Streams and elements of one."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_streams", "width"), SHAPES)
def test_hyper_connections(kind: str, num_streams: int, width: int) -> None:
    low_rank = width // 2
    z = numbers("z", (NUM_ROWS, low_rank + num_streams), kind)
    y, normed, streams = (numbers(seed, (NUM_ROWS, num_streams * width), kind) for seed in ("y", "n", "s"))
    output, weights = numbers("output", (NUM_ROWS, width), kind), numbers("w", (NUM_ROWS, num_streams))
    gates = hyper.mixer_row(z[:, :low_rank], num_streams), hyper.injection_weights(z[:, low_rank:], num_streams)
    mixed = hyper.mixed_row(y, normed, num_streams)
    written, before = hyper.written_streams(streams, output, weights), streams.copy()
    any_nan = kind == "special"
    for _ in machines():
        found = _C.hyper_gates(z, num_streams, low_rank)
        for of_kernel, of_oracle in zip(found, gates, strict=True):
            assert_same_bits(of_kernel, of_oracle, any_nan=any_nan)
        assert_same_bits(_C.hyper_mix(y, normed, num_streams), mixed, any_nan=any_nan)
        assert_same_bits(_C.hyper_write(streams, output, weights), written, any_nan=any_nan)
    assert_same_bits(streams, before)


def test_a_mixer_without_injection_weights() -> None:
    z = numbers("z", (NUM_ROWS, 9))
    for _ in machines():
        inner, none = _C.hyper_gates(z, 4, 9)
        assert_same_bits(inner, hyper.mixer_row(z, 4))
        assert none.shape == (NUM_ROWS, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_streams", "width"), SHAPES)
def test_ngram_values(kind: str, num_streams: int, width: int) -> None:
    """Also where a stream's key and query are orthogonal: such a gate is one half."""
    keys, queries = (numbers(seed, (NUM_ROWS, num_streams * width), kind) for seed in ("keys", "queries"))
    keys[2], keys[3] = 0, np.abs(queries[3]) * np.float32(1e-9)
    value, scale = numbers("value", (NUM_ROWS, width), kind), float(inverse_sqrt(width))
    expected = stream_values(keys, queries, value, scale)
    for _ in machines():
        assert_same_bits(_C.ngram_values(keys, queries, value, scale), expected, any_nan=kind == "special")


@pytest.mark.parametrize("bad", ["keys", "queries", "value"])
def test_an_ngram_gate_that_is_no_number_shows(bad: str) -> None:
    parts = {"keys": numbers("keys", (2, 60)), "queries": numbers("queries", (2, 60)), "value": numbers("v", (2, 20))}
    parts[bad][1, 5] = np.nan
    for _ in machines():
        values = _C.ngram_values(parts["keys"], parts["queries"], parts["value"], 0.2)
        assert np.isfinite(values[0]).all()
        assert np.isnan(values[1]).any()


@pytest.mark.parametrize("kind", KINDS)
def test_output_gate(kind: str) -> None:
    x, gate = numbers("x", (5, 3, 33), kind), numbers("gate", (5, 3, 33), kind)
    expected = gated(x, gate)
    for _ in machines():
        assert_same_bits(_C.sigmoid_times(x, gate), expected, any_nan=kind == "special")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("width", [1, 20, 64, 130])
def test_gated_norm(kind: str, activation: str, width: int) -> None:
    x, gate = numbers("x", (4, 2, width), kind), numbers("gate", (4, 2, width), kind)
    weight = numbers("weight", (width,))
    expected = gated_norm(x, gate, weight, 1e-6, activation)
    for _ in machines():
        found = _C.gated_norm(x, gate, weight, 1e-6, activation)
        assert_same_bits(found, expected, any_nan=kind == "special")


@pytest.mark.parametrize("one_plus_weight", [False, True])
@pytest.mark.parametrize(("num_groups", "width"), SHAPES)
def test_grouped_norm(num_groups: int, width: int, one_plus_weight: bool) -> None:
    """Group by group in each row; a row of groups may also lie flat."""
    x, weight = numbers("x", (NUM_ROWS, num_groups, width), "mixed"), numbers("weight", (num_groups, width))
    expected = rms_norm(x, weight, 1e-6, one_plus_weight)
    flat = x.reshape(NUM_ROWS, -1)
    assert_same_bits(grouped_rms_norm(flat, weight.reshape(-1), num_groups, 1e-6, one_plus_weight), flat_of(expected))
    for _ in machines():
        assert_same_bits(_C.rms_norm(x, weight, 1e-6, one_plus_weight), expected)
        by_group = _C.rms_norm(x.reshape(-1, width), weight, 1e-6, one_plus_weight)
        assert_same_bits(by_group.reshape(x.shape), expected)


def flat_of(x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), -1)
