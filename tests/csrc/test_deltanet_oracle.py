"""deltanet is the oracle's, however rows are cut into calls and after going back; and the oracle is the delta rule."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from bits import assert_same_bits
from csrc.steps import Step, cut, one_by_one, replay, step, whole
from leafsum import _C
from machines import machine, machines
from numpy.typing import NDArray
from oracle.deltanet import Results, deltanet
from oracle.inputs import F32, I32, KINDS, numbers
from oracle.rounding import DTYPES, Storage, inverse_sqrt, narrow

NUM_SLOTS, NUM_ROWS = 3, 130
LENGTHS = {2: 130, 0: 65}
"""By slot; slot 1 stays unused."""
PLANS = {
    "whole": whole(LENGTHS),
    "one by one": one_by_one(LENGTHS),
    "cut": cut(LENGTHS, (1, 3, 40, 63, 64, 65, 127, 129)),
    "at borders": cut(LENGTHS, (64, 128)),
}
F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Heads:
    """key_index [Hv]: the key head of each value head; a rank's share may begin or end inside a group."""

    key_index: tuple[int, ...]
    key_dim: int
    value_dim: int

    @property
    def num_key_heads(self) -> int:
        return max(self.key_index) + 1


HEADS = {
    "ratio 1": Heads((0, 1), 12, 16),
    "ratio 2": Heads((0, 0, 1, 1), 5, 33),
    "ratio 3": Heads((0, 0, 0), 16, 7),
    "a rank's share": Heads((0, 1, 1, 1, 2), 8, 20),
    "wide": Heads((0,), 20, 144),
}


@dataclass(frozen=True, slots=True)
class Inputs:
    """qkv [slots, T, 2 * Hk * Dk + Hv * Dv], b and a [slots, T, Hv], a_log and dt_bias [Hv]."""

    qkv: F32
    b: F32
    a: F32
    a_log: F32
    dt_bias: F32


def make_inputs(heads: Heads, kind: str = "plain", seed: str = "", num_rows: int = NUM_ROWS) -> Inputs:
    """Decays from next to nothing a row to nearly all."""
    num_heads = len(heads.key_index)
    width = 2 * heads.num_key_heads * heads.key_dim + num_heads * heads.value_dim
    gates = (NUM_SLOTS, num_rows, num_heads)
    return Inputs(
        numbers(f"{seed}qkv", (NUM_SLOTS, num_rows, width), kind),
        numbers(f"{seed}b", gates),
        numbers(f"{seed}a", gates),
        numbers("a_log", (num_heads,)),
        numbers("dt_bias", (num_heads,)) - np.float32(3),
    )


def expected_of(heads: Heads, inputs: Inputs, slot: int, dtype: str, num_rows: int = NUM_ROWS) -> Results:
    rows = (part[slot, :num_rows] for part in (inputs.qkv, inputs.b, inputs.a))
    key_index, scale = np.array(heads.key_index, dtype=np.int32), float(inverse_sqrt(heads.key_dim))
    shape = heads.num_key_heads, heads.key_dim
    return deltanet(*rows, inputs.a_log, inputs.dt_bias, key_index, *shape, scale, dtype)


@dataclass(frozen=True, slots=True)
class Memory:
    """What a layer keeps for every slot."""

    states: F32
    keys: Storage
    updates: F32
    decays: F32

    @property
    def parts(self) -> tuple[F32, Storage, F32, F32]:
        return self.states, self.keys, self.updates, self.decays


def empty_memory(heads: Heads, dtype: str) -> Memory:
    """Nothing in it is a number."""
    num_heads, key_dim, value_dim = len(heads.key_index), heads.key_dim, heads.value_dim
    keys = np.full((NUM_SLOTS, 2, heads.num_key_heads, key_dim, 64), np.nan, dtype=np.float32)
    return Memory(
        np.full((NUM_SLOTS, 2, num_heads, key_dim, value_dim), np.nan, dtype=np.float32),
        narrow(keys, dtype),
        np.full((NUM_SLOTS, 128, num_heads, value_dim), np.nan, dtype=np.float32),
        np.full((NUM_SLOTS, 128, num_heads), np.nan, dtype=np.float32),
    )


def run(heads: Heads, inputs: Inputs, steps: list[Step], memory: Memory, dtype: str) -> F32:
    """[slots, T, Hv, Dv]; rows that no step has are NaN."""
    key_index: I32 = np.array(heads.key_index, dtype=np.int32)
    outputs = np.full((*inputs.b.shape, heads.value_dim), np.nan, dtype=np.float32)
    scale = float(inverse_sqrt(heads.key_dim))

    def call(each: Step) -> F32:
        rows = (part[each.slots, each.positions] for part in (inputs.qkv, inputs.b, inputs.a))
        gates = inputs.a_log, inputs.dt_bias, key_index
        return _C.deltanet(*rows, *gates, *memory.parts, *each.runs, scale, dtype)

    return replay(steps, call, outputs)


def check_memory(memory: Memory, slot: int, expected: Results, dtype: str) -> None:
    """The last 128 rows and the last two borders, each at its place."""
    positions = np.arange(max(0, len(expected.keys) - 128), len(expected.keys))
    keys = memory.keys[slot][positions // 64 % 2, :, :, positions % 64]
    assert_same_bits(keys, narrow(expected.keys[positions], dtype))
    assert_same_bits(memory.updates[slot, positions % 128], expected.updates[positions])
    assert_same_bits(memory.decays[slot, positions % 128], expected.decays[positions])
    for border in range(max(0, len(expected.states) - 2), len(expected.states)):
        assert_same_bits(memory.states[slot, border % 2], expected.states[border])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "bfloat16") for name in HEADS), *(("a rank's share", dtype) for dtype in DTYPES if dtype != "bfloat16")],
)
def test_rows_and_memory(name: str, dtype: str) -> None:
    heads = HEADS[name]
    inputs, fresh = make_inputs(heads), empty_memory(heads, dtype)
    expected = {slot: expected_of(heads, inputs, slot, dtype, length) for slot, length in LENGTHS.items()}
    for steps in PLANS.values():
        for _ in machines():
            memory = empty_memory(heads, dtype)
            outputs = run(heads, inputs, steps, memory, dtype)
            for slot, results in expected.items():
                assert_same_bits(outputs[slot, : LENGTHS[slot]], results.outputs)
                check_memory(memory, slot, results, dtype)
            for part, before in zip(memory.parts, fresh.parts, strict=True):
                assert_same_bits(part[1], before[1])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "plain"])
def test_kinds_of_numbers(kind: str) -> None:
    heads, dtype = HEADS["a rank's share"], "bfloat16"
    inputs = make_inputs(heads, kind)
    expected = {slot: expected_of(heads, inputs, slot, dtype, 70) for slot in (0, 2)}
    for _ in machines():
        memory = empty_memory(heads, dtype)
        outputs = run(heads, inputs, cut({0: 70, 2: 70}, (31,)), memory, dtype)
        for slot, results in expected.items():
            assert_same_bits(outputs[slot, :70], results.outputs, any_nan=True)
            assert_same_bits(memory.states[slot, 1], results.states[1], any_nan=True)


@pytest.mark.parametrize("rate", [-12.0, 0.0, 12.0])
def test_decays_of_nothing_and_of_all(rate: float) -> None:
    """exp(A_log) times softplus from far below one rounding to far beyond what exp can hold."""
    heads, dtype = HEADS["ratio 2"], "float32"
    made = make_inputs(heads)
    inputs = replace(made, a_log=made.a_log + np.float32(rate), dt_bias=made.dt_bias + np.float32(rate))
    expected = expected_of(heads, inputs, 2, dtype)
    assert np.isfinite(expected.outputs).all()
    for _ in machines():
        outputs = run(heads, inputs, cut({2: NUM_ROWS}, (40,)), empty_memory(heads, dtype), dtype)
        assert_same_bits(outputs[2], expected.outputs)


@pytest.mark.parametrize(("num_rows", "back_to"), [(130, 66), (130, 128), (130, 129), (128, 64), (130, 127), (129, 65)])
def test_going_back(num_rows: int, back_to: int) -> None:
    """By at most 64 rows, and on with other rows: as if the first had never been. The other slot stays as it was."""
    heads, dtype = HEADS["ratio 3"], "bfloat16"
    first, other = make_inputs(heads), make_inputs(heads, seed="other")
    final = Inputs(*(with_other_rows(first, other, name, back_to) for name in ("qkv", "b", "a")), *gates_of(first))
    expected = {2: expected_of(heads, final, 2, dtype), 0: expected_of(heads, first, 0, dtype, num_rows)}
    together = [step((2, 0, num_rows - 1), (0, 0, 3)), step((0, 3, num_rows), (2, num_rows - 1, num_rows))]
    for instruction_set in _C.instruction_sets():
        with machine(instruction_set, 2):
            memory = empty_memory(heads, dtype)
            run(heads, first, together, memory, dtype)
            steps = cut({2: NUM_ROWS}, (back_to, back_to + 1, 129))[1:]
            outputs = run(heads, final, steps, memory, dtype)
        assert_same_bits(outputs[2, back_to:], expected[2].outputs[back_to:])
        for slot, results in expected.items():
            check_memory(memory, slot, results, dtype)


def with_other_rows(first: Inputs, other: Inputs, name: str, back_to: int) -> F32:
    return np.concatenate([getattr(first, name)[:, :back_to], getattr(other, name)[:, back_to:]], axis=1)


def gates_of(inputs: Inputs) -> tuple[F32, F32]:
    return inputs.a_log, inputs.dt_bias


@pytest.mark.parametrize("part", ["qkv", "b", "a"])
def test_a_row_that_is_no_number_reaches_no_earlier_row_and_no_other_slot(part: str) -> None:
    heads, dtype, bad_row = HEADS["ratio 2"], "bfloat16", 40
    good, bad = make_inputs(heads), make_inputs(heads)
    getattr(bad, part)[2, bad_row] = np.nan
    steps = cut({0: 70, 2: 70}, (30,))
    for _ in machines():
        expected = run(heads, good, steps, empty_memory(heads, dtype), dtype)
        found = run(heads, bad, steps, empty_memory(heads, dtype), dtype)
        assert_same_bits(found[0], expected[0])
        assert_same_bits(found[2, :bad_row], expected[2, :bad_row])
        assert np.isnan(found[2, bad_row:70]).all()


def test_rows_without_keys() -> None:
    """q and k of zeros: nothing is read and nothing written but by decay."""
    heads, dtype = HEADS["ratio 3"], "float32"
    inputs = make_inputs(heads)
    inputs.qkv[:, 20:110, : 2 * heads.key_dim] = 0
    expected = expected_of(heads, inputs, 2, dtype)
    assert (expected.outputs[20:110] == 0).all()
    for _ in machines():
        outputs = run(heads, inputs, cut({2: NUM_ROWS}, (64,)), empty_memory(heads, dtype), dtype)
        assert_same_bits(outputs[2], expected.outputs)


def test_no_rows() -> None:
    heads = HEADS["ratio 1"]
    inputs, memory, none = make_inputs(heads), empty_memory(heads, "float32"), np.zeros(0, dtype=np.int32)
    rows = (np.ascontiguousarray(part[0, :0]) for part in (inputs.qkv, inputs.b, inputs.a))
    index = np.array(heads.key_index, dtype=np.int32)
    runs = none, none, none, none
    assert _C.deltanet(*rows, *gates_of(inputs), index, *memory.parts, *runs, 1.0, "float32").shape == (0, 2, 16)


def test_the_oracle_is_the_delta_rule() -> None:
    """Against the recurrence itself in double precision, 1,000 rows with gates as trained models have them."""
    heads, num_rows = Heads((0, 0), 24, 20), 1000
    inputs = make_inputs(heads, num_rows=num_rows)
    found = expected_of(heads, inputs, 0, "float32", num_rows).outputs
    expected = recurrence(heads, inputs)
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def recurrence(heads: Heads, inputs: Inputs) -> F64:
    """Slot 0: one state a value head, row after row."""
    qkv, b, a, a_log, dt_bias = (
        part.astype(np.float64) for part in (inputs.qkv[0], inputs.b[0], inputs.a[0], inputs.a_log, inputs.dt_bias)
    )
    num_keys = heads.num_key_heads * heads.key_dim
    q, k = (unit(qkv[:, start : start + num_keys], heads) for start in (0, num_keys))
    v = qkv[:, 2 * num_keys :].reshape(len(qkv), len(heads.key_index), heads.value_dim)
    decays, betas = np.exp(-np.exp(a_log) * np.log1p(np.exp(a + dt_bias))), 1 / (1 + np.exp(-b))
    state = np.zeros((len(heads.key_index), heads.key_dim, heads.value_dim))
    outputs = np.empty_like(v)
    for t in range(len(qkv)):
        state = state * decays[t, :, None, None]
        update = betas[t, :, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], state))
        state = state + k[t][:, :, None] * update[:, None, :]
        outputs[t] = np.einsum("hk,hkv->hv", q[t], state) * heads.key_dim**-0.5
    return outputs


def unit(x: F64, heads: Heads) -> F64:
    """[T, Hk * Dk] -> [T, Hv, Dk]."""
    by_head = x.reshape(len(x), heads.num_key_heads, heads.key_dim)
    return (by_head / np.sqrt((by_head**2).sum(axis=2, keepdims=True) + 1e-6))[:, list(heads.key_index)]
