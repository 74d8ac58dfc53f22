"""Bad input: a ValueError that names the argument, what was expected and what was found; never a read out of bounds."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from leafsum import _C

NUM_ROWS, HIDDEN, INNER, NUM_SLOTS, NUM_EXPERTS = 3, 32, 16, 2, 4
PAGES, HEADS, DIM, PAGE_SIZE = 5, 2, 8, 4


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def linear_arguments() -> dict[str, Any]:
    packed = _C.pack_weight(zeros(20, HIDDEN), "float32")
    return {
        "x": zeros(NUM_ROWS, HIDDEN),
        "packed": packed,
        "dtype": "float32",
        "num_columns": 20,
        "leaf_k": 0,
        "bias": zeros(20),
    }


def expert_arguments() -> dict[str, Any]:
    return {
        "x": zeros(NUM_ROWS, HIDDEN),
        "slot_ids": np.zeros((NUM_ROWS, NUM_SLOTS), np.int32),
        "slot_weights": zeros(NUM_ROWS, NUM_SLOTS),
        "gate": zeros(2, 1, HIDDEN, 16),
        "up": zeros(2, 1, HIDDEN, 16),
        "down": zeros(2, 2, INNER, 16),
        "local_index": ids(0, 1, -1, -1),
        "dtype": "float32",
        "out": zeros(NUM_ROWS, NUM_SLOTS, HIDDEN),
    }


def store_arguments() -> dict[str, Any]:
    return {
        "k": zeros(NUM_ROWS, HEADS, DIM),
        "v": zeros(NUM_ROWS, HEADS, DIM),
        "key_pages": zeros(PAGES, HEADS, DIM, PAGE_SIZE),
        "value_pages": zeros(PAGES, HEADS, PAGE_SIZE, DIM),
        "row_pages": ids(0, 1, 4),
        "row_offsets": ids(0, 3, 1),
        "dtype": "float32",
    }


def attention_arguments() -> dict[str, Any]:
    return {
        "q": zeros(NUM_ROWS, 4, DIM),
        "key_pages": zeros(PAGES, HEADS, DIM, PAGE_SIZE),
        "value_pages": zeros(PAGES, HEADS, PAGE_SIZE, DIM),
        "page_table": np.array([[0, 1], [2, -1]], np.int32),
        "row_slots": ids(0, 1, 1),
        "row_num_keys": ids(8, 4, 0),
        "kv_index": ids(0, 0, 1, 1),
        "scale": 0.5,
        "dtype": "float32",
    }


def tree_arguments() -> dict[str, Any]:
    return {
        "slot_rows": zeros(2, 3, HIDDEN),
        "slot_ids": np.array([[0, 9, 12], [-1, 3, -1]], np.int32),
        "num_ids": 12,
        "ids_per_leaf": 8,
        "has_shared": True,
        "given_nodes": ids(),
        "given_rows": zeros(2, 0, HIDDEN),
        "wanted_nodes": ids(1, 2, 3),
    }


def router_arguments() -> dict[str, Any]:
    return {"logits": zeros(NUM_ROWS, NUM_EXPERTS), "top_k": 2, "renormalise": True}


def rotary_arguments() -> dict[str, Any]:
    return {"x": zeros(3, 2, DIM), "positions": ids(0, 1, 2), "frequencies": zeros(4), "attention_factor": 1.0}


def norm_arguments() -> dict[str, Any]:
    return {"x": zeros(NUM_ROWS, HIDDEN), "weight": zeros(HIDDEN), "eps": 1e-6, "one_plus_weight": False}


def read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


BAD = [
    (
        _C.linear,
        linear_arguments,
        "x",
        zeros(NUM_ROWS, HIDDEN).astype(np.float64),
        "expected an array of native float32, found float64",
    ),
    (
        _C.linear,
        linear_arguments,
        "x",
        zeros(NUM_ROWS, HIDDEN).astype(">f4"),
        "expected an array of native float32, found >f4",
    ),
    (_C.linear, linear_arguments, "x", zeros(HIDDEN), r"expected shape \[M, K\], found shape \[32\]"),
    (_C.linear, linear_arguments, "x", zeros(HIDDEN, NUM_ROWS).T, "expected a C-contiguous array"),
    (_C.linear, linear_arguments, "packed", zeros(2, HIDDEN + 1, 16), r"K=32, lanes=16\], found shape \[2, 33, 16\]"),
    (_C.linear, linear_arguments, "packed", np.zeros((2, HIDDEN, 16), np.uint16), "found uint16"),
    (_C.linear, linear_arguments, "num_columns", 33, "blocks=3"),
    (_C.linear, linear_arguments, "num_columns", -1, "expected 0 or more, found -1"),
    (_C.linear, linear_arguments, "leaf_k", -1, "found -1"),
    (_C.linear, linear_arguments, "bias", zeros(19), r"expected shape \[N=20\], found shape \[19\]"),
    (_C.linear, linear_arguments, "dtype", "float64", "expected float32, bfloat16 or float16, found 'float64'"),
    (_C.experts, expert_arguments, "slot_ids", np.full((3, 2), NUM_EXPERTS, np.int32), "found 4 at flat index 0"),
    (_C.experts, expert_arguments, "local_index", ids(0, 2, -1, -1), "found 2 at flat index 1"),
    (_C.experts, expert_arguments, "up", zeros(2, 1, HIDDEN, 8), "lanes=16"),
    (_C.experts, expert_arguments, "down", zeros(2, 1, INNER, 16), "H/16=2"),
    (_C.experts, expert_arguments, "out", zeros(3, 2, HIDDEN - 1), "H=32"),
    (_C.experts, expert_arguments, "out", read_only(zeros(3, 2, HIDDEN)), "expected a writeable array"),
    (_C.store_kv, store_arguments, "row_pages", ids(0, 1, PAGES), "expected values 0 to 4, found 5"),
    (_C.store_kv, store_arguments, "row_offsets", ids(0, -1, 0), "expected values 0 to 3, found -1"),
    (_C.store_kv, store_arguments, "value_pages", zeros(PAGES, HEADS, DIM, PAGE_SIZE), "page_size=4"),
    (_C.attention, attention_arguments, "row_slots", ids(0, 2, 1), "found 2 at flat index 1"),
    (_C.attention, attention_arguments, "row_num_keys", ids(9, 0, 0), "expected values 0 to 8, found 9"),
    (_C.attention, attention_arguments, "row_num_keys", ids(8, 5, 0), "page_table: expected values 0 to 4, found -1"),
    (_C.attention, attention_arguments, "kv_index", ids(0, 0, 1, 2), "expected values 0 to 1, found 2"),
    (_C.attention, attention_arguments, "key_pages", zeros(PAGES, HEADS, DIM + 1, PAGE_SIZE), "D=8"),
    (_C.tree_nodes, tree_arguments, "slot_ids", np.array([[0, 9, 13], [1, 2, 3]], np.int32), "found 13"),
    (_C.tree_nodes, tree_arguments, "slot_ids", np.array([[0, 9, -2], [1, 2, 3]], np.int32), "found -2"),
    (
        _C.tree_nodes,
        lambda: tree_arguments() | {"has_shared": False},
        "slot_ids",
        np.array([[0, 9, 12], [1, 2, 3]], np.int32),
        "to 11",
    ),
    (_C.tree_nodes, tree_arguments, "slot_ids", np.array([[0, 9, 9], [1, 2, 3]], np.int32), "9 after 9 in row 0"),
    (_C.tree_nodes, tree_arguments, "wanted_nodes", ids(4), "expected values 1 to 3, found 4"),
    (_C.tree_nodes, tree_arguments, "wanted_nodes", ids(0), "expected values 1 to 3, found 0"),
    (_C.tree_nodes, tree_arguments, "given_nodes", ids(7), "expected values 1 to 3, found 7"),
    (_C.tree_nodes, tree_arguments, "given_rows", zeros(2, 1, HIDDEN), "G=0"),
    (_C.tree_nodes, tree_arguments, "num_ids", 0, "found 0"),
    (_C.tree_nodes, tree_arguments, "ids_per_leaf", 0, "found 0"),
    (_C.router, router_arguments, "top_k", NUM_EXPERTS + 1, "expected 1 to E = 4, found 5"),
    (_C.router, router_arguments, "top_k", 0, "found 0"),
    (_C.rotary, rotary_arguments, "frequencies", zeros(5), "expected at most D/2 = 4, found 5"),
    (_C.rotary, rotary_arguments, "positions", ids(0, 1), r"M=3\], found shape \[2\]"),
    (_C.rotary, rotary_arguments, "positions", np.zeros(3, np.int64), "expected an array of native int32, found int64"),
    (_C.rms_norm, norm_arguments, "weight", zeros(HIDDEN + 1), r"expected shape \[N=32\], found shape \[33\]"),
]


@pytest.mark.parametrize(
    "call", [linear_arguments, expert_arguments, store_arguments, attention_arguments, tree_arguments]
)
def test_the_arguments_of_these_tests_are_good(call: Callable[[], dict[str, Any]]) -> None:
    functions = {
        linear_arguments: _C.linear,
        expert_arguments: _C.experts,
        store_arguments: _C.store_kv,
        attention_arguments: _C.attention,
        tree_arguments: _C.tree_nodes,
    }
    functions[call](**call())


@pytest.mark.parametrize(("function", "good", "argument", "value", "text"), BAD)
def test_names_argument_expected_and_found(function: Any, good: Any, argument: str, value: Any, text: str) -> None:
    # A number of columns shows as the shape of the packed weight, a number of keys as the pages it would read.
    shown_as = {"num_columns": "(num_columns|packed)", "row_num_keys": "(row_num_keys|page_table)"}
    with pytest.raises(ValueError, match=f"^{shown_as.get(argument, argument)}: .*") as caught:
        function(**{**good(), argument: value})
    assert caught.match(text)


def test_leaves_must_divide_the_reduced_axis() -> None:
    arguments = linear_arguments()
    del arguments["bias"]
    with pytest.raises(ValueError, match="leaf_k: expected a divisor of K = 32, found 5"):
        _C.linear_leaves(**{**arguments, "leaf_k": 5})


@pytest.mark.parametrize("function", [_C.exp, _C.log, _C.sin, _C.cos, _C.sigmoid, _C.softplus])
def test_functions_take_fp32_alone(function: Any) -> None:
    with pytest.raises(ValueError, match="x: expected an array of native float32, found float64"):
        function(np.zeros(3))
    assert function(zeros(2, 0, 3)).shape == (2, 0, 3)
    assert function(zeros()).shape == ()


def test_shapes_of_swiglu_are_the_same() -> None:
    with pytest.raises(ValueError, match=r"up: expected the shape of gate \(2, 3\), found \(3, 2\)"):
        _C.swiglu(zeros(2, 3), zeros(3, 2))


def test_unaligned_memory_is_refused() -> None:
    shifted = np.zeros(17, np.uint8)[1:].view(np.float32)
    with pytest.raises(ValueError, match="x: expected aligned memory"):
        _C.exp(shifted)


def test_threads_and_instruction_sets_are_checked() -> None:
    with pytest.raises(ValueError, match="num_threads: expected 1 to 1024, found 0"):
        _C.set_num_threads(0)
    with pytest.raises(ValueError, match=r"name: expected an instruction set of this machine \(.*plain\), found 'mmx'"):
        _C.set_instruction_set("mmx")


def test_negative_ids_are_no_slots() -> None:
    arguments = expert_arguments()
    arguments["slot_ids"] = np.full((NUM_ROWS, NUM_SLOTS), -1, np.int32)
    arguments["out"][:] = 7
    _C.experts(**arguments)
    assert (arguments["out"] == 7).all()


def test_ranks_without_heads_or_experts_have_empty_arrays() -> None:
    empty = _C.pack_weight(zeros(0, HIDDEN), "float32")
    assert empty.shape == (0, HIDDEN, 16)
    assert _C.linear(zeros(2, HIDDEN), empty, "float32", 0, 0, None).shape == (2, 0)
    assert _C.linear_leaves(zeros(2, 0), _C.pack_weight(zeros(20, 0), "float32"), "float32", 20, 4).shape == (2, 0, 20)
    heads = {"q": zeros(NUM_ROWS, 0, DIM), "key_pages": zeros(PAGES, 0, DIM, PAGE_SIZE), "kv_index": ids()}
    heads["value_pages"] = zeros(PAGES, 0, PAGE_SIZE, DIM)
    assert _C.attention(**{**attention_arguments(), **heads}).shape == (NUM_ROWS, 0, DIM)
    experts = {"gate": zeros(0, 1, HIDDEN, 16), "up": zeros(0, 1, HIDDEN, 16), "down": zeros(0, 2, INNER, 16)}
    _C.experts(**{**expert_arguments(), **experts, "local_index": ids(-1, -1, -1, -1)})
