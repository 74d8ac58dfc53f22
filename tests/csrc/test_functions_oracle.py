"""exp, log, sin, cos, sigmoid and softplus are correctly rounded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from bits import assert_same_bits
from leafsum import _C
from machines import machines
from oracle.functions import FUNCTIONS, ByDoubles, exp, sigmoid, softplus
from oracle.inputs import F32, KINDS, numbers, raw_bits

HARD_ARGUMENTS: dict[str, list[int]] = json.loads(Path(__file__).with_name("hard_arguments.json").read_text())
"""Bit patterns of the arguments whose exact value lies within 2^-49 (relative) of a border between two roundings."""


def assert_correctly_rounded(name: str, x: F32) -> None:
    expected = FUNCTIONS[name](x)
    for _ in machines():
        assert_same_bits(getattr(_C, name)(x), expected, any_nan=True)


def arguments(count: int) -> F32:
    """Any bit patterns, and numbers of the size at which the functions bend."""
    anywhere = raw_bits("anywhere", count).astype(np.uint32).view(np.float32)
    near = numbers("near", (count,)) * np.float32(8)
    return np.concatenate([anywhere, near, near * np.float32(8)])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_anywhere(name: str) -> None:
    assert_correctly_rounded(name, arguments(500))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_numbers(name: str, kind: str) -> None:
    assert_correctly_rounded(name, numbers("functions", (3, 37), kind))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_borders(name: str) -> None:
    edges = [
        0.0,
        2.0**-149,
        2.0**-126,
        2.0**-24,
        2.0**-25,
        0.5,
        1.0,
        16.0,
        17.0,
        87.3,
        88.7,
        103.3,
        103.97,
        104.0,
        np.inf,
    ]
    magnitudes = np.array(edges, dtype=np.float32)
    around = [magnitudes, np.nextafter(magnitudes, np.float32(0)), np.nextafter(magnitudes[:-1], np.float32(np.inf))]
    x = np.concatenate([*around, np.array([np.nan], dtype=np.float32)])
    assert_correctly_rounded(name, np.concatenate([x, -x]))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_hard_arguments(name: str) -> None:
    bits = np.array(HARD_ARGUMENTS[name], dtype=np.uint32)
    mirrored = bits ^ np.uint32(1 << 31) if name in ("sin", "cos") else bits
    assert_correctly_rounded(name, np.concatenate([bits, mirrored]).view(np.float32))


@pytest.mark.parametrize(("name", "function"), [("exp", exp), ("sigmoid", sigmoid), ("softplus", softplus)])
def test_functions_by_way_of_doubles_are_the_exact_ones(name: str, function: ByDoubles) -> None:
    hard = np.array(HARD_ARGUMENTS[name], dtype=np.uint32).view(np.float32)
    x = np.concatenate([arguments(500), hard])
    assert_same_bits(function(x), FUNCTIONS[name](x), any_nan=True)


@pytest.mark.full
@pytest.mark.parametrize("name", FUNCTIONS)
def test_many_arguments(name: str) -> None:
    assert_correctly_rounded(name, arguments(100_000))
