"""swiglu and experts are the oracle's; rows of experts that are not here stay untouched."""

from __future__ import annotations

import numpy as np
import pytest
from bits import assert_same_bits
from leafsum import _C
from machines import machines
from oracle.experts import Expert, slot_values, swiglu
from oracle.inputs import F32, FINITE_KINDS, KINDS, integers, numbers, permutation, weights
from oracle.linear import pack
from oracle.rounding import DTYPES

NUM_EXPERTS, NUM_SLOTS = 6, 3


@pytest.mark.parametrize("kind", KINDS)
def test_swiglu(kind: str) -> None:
    gate, up = numbers("gate", (5, 33), kind), numbers("up", (5, 33), kind)
    expected = swiglu(gate, up)
    for _ in machines():
        assert_same_bits(_C.swiglu(gate, up), expected, any_nan=kind == "special")


def make_experts(hidden: int, width: int, dtype: str, kind: str) -> list[Expert]:
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    return [
        Expert(**{part: weights(f"{part}{i}", shape, dtype, kind) for part, shape in shapes.items()})
        for i in range(NUM_EXPERTS)
    ]


def untouched(num_rows: int, hidden: int) -> F32:
    return np.full((num_rows, NUM_SLOTS, hidden), np.nan, dtype=np.float32)


@pytest.mark.parametrize("kind", [kind for kind in FINITE_KINDS if kind != "scales"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "hidden", "width"), [(1, 16, 16), (7, 20, 37)])
@pytest.mark.parametrize("owned", [(0, 1, 2, 3, 4, 5), (4, 1), ()])
def test_experts(kind: str, dtype: str, num_rows: int, hidden: int, width: int, owned: tuple[int, ...]) -> None:
    """owned lists ids in the order of their local index."""
    everyone = make_experts(hidden, width, dtype, kind)
    x, slot_weights = numbers("x", (num_rows, hidden), kind), numbers("slots", (num_rows, NUM_SLOTS), "mixed")
    ids = np.stack([np.sort(permutation(f"ids{i}", NUM_EXPERTS)[:NUM_SLOTS]) for i in range(num_rows)]).astype(np.int32)
    expected = untouched(num_rows, hidden)
    slot_values(x, ids, slot_weights, [e if i in owned else None for i, e in enumerate(everyone)], dtype, expected)
    local_index = np.array([owned.index(i) if i in owned else -1 for i in range(NUM_EXPERTS)], dtype=np.int32)
    gate, up, down = (stacked(everyone, owned, part) for part in ("gate", "up", "down"))
    for _ in machines():
        out = untouched(num_rows, hidden)
        _C.experts(x, ids, slot_weights, gate, up, down, local_index, dtype, out)
        assert_same_bits(out, expected, any_nan=True)


def stacked(experts: list[Expert], owned: tuple[int, ...], part: str) -> np.ndarray:
    """[n, blocks, K, 16]; n may be zero."""
    packed = [pack(getattr(expert, part)) for expert in experts]
    return np.stack([packed[i] for i in owned]) if owned else np.zeros((0, *packed[0].shape), dtype=packed[0].dtype)


def test_rows_that_are_not_here_keep_their_bits() -> None:
    everyone, owned = make_experts(16, 16, "float32", "plain"), (2,)
    ids = np.array([[0, 2, 5]], dtype=np.int32)
    out = numbers("marks", (1, NUM_SLOTS, 16), "special")
    marks = out.copy()
    packed = [stacked(everyone, owned, part) for part in ("gate", "up", "down")]
    local_index = np.array([-1, -1, 0, -1, -1, -1], dtype=np.int32)
    _C.experts(numbers("x", (1, 16)), ids, numbers("w", (1, 3)), *packed, local_index, "float32", out)
    assert_same_bits(out[:, [0, 2]], marks[:, [0, 2]])
    assert np.isfinite(out[:, 1]).all()


def test_one_expert_for_every_row() -> None:
    """All rows of a batch in one expert: the shape that a kernel may treat as one matrix."""
    everyone = make_experts(24, 18, "bfloat16", "plain")
    num_rows = 100  # More than a task has.
    x, slot_weights = numbers("x", (num_rows, 24)), numbers("slots", (num_rows, NUM_SLOTS))
    ids = np.tile(np.array([1, 3, 4], dtype=np.int32), (num_rows, 1))
    ids[integers("other", 0, num_rows, (5,)), 2] = 5
    owned = tuple(range(NUM_EXPERTS))
    expected, out = untouched(num_rows, 24), untouched(num_rows, 24)
    slot_values(x, ids, slot_weights, everyone, "bfloat16", expected)
    packed = [stacked(everyone, owned, part) for part in ("gate", "up", "down")]
    for _ in machines():
        _C.experts(x, ids, slot_weights, *packed, np.arange(NUM_EXPERTS, dtype=np.int32), "bfloat16", out)
        assert_same_bits(out, expected)
        out[:] = np.nan
