"""Bad input of kernels that keep memory by slot, and of hyper-connections: a ValueError that names the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from leafsum import _C

NUM_ROWS, SLOTS, CHANNELS = 3, 2, 8
KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 3, 4, 5
STREAMS, HIDDEN = 2, 6

Arguments = dict[str, Any]


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def runs() -> Arguments:
    """Rows 0 and 2 of slot 1 from position 5 on, row 1 of slot 0 at position 0."""
    return {"row_order": ids(0, 2, 1), "run_slots": ids(1, 0), "run_starts": ids(5, 0), "run_ends": ids(2, 3)}


def conv_arguments() -> Arguments:
    rows = {"x": zeros(NUM_ROWS, CHANNELS), "weight": zeros(4, CHANNELS), "dilation": 2}
    return {**rows, "ring": zeros(SLOTS, 7, CHANNELS), **runs()}


def deltanet_arguments() -> Arguments:
    return {
        "qkv": zeros(NUM_ROWS, 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM),
        "b": zeros(NUM_ROWS, HEADS),
        "a": zeros(NUM_ROWS, HEADS),
        "a_log": zeros(HEADS),
        "dt_bias": zeros(HEADS),
        "key_index": ids(0, 1, 1),
        "states": zeros(SLOTS, 2, HEADS, KEY_DIM, VALUE_DIM),
        "keys": zeros(SLOTS, 2, KEY_HEADS, KEY_DIM, 64),
        "updates": zeros(SLOTS, 128, HEADS, VALUE_DIM),
        "decays": zeros(SLOTS, 128, HEADS),
        **runs(),
        "scale": 0.5,
        "dtype": "float32",
    }


def store_arguments() -> Arguments:
    return {
        "raw": zeros(NUM_ROWS, CHANNELS),
        "ring": zeros(SLOTS, 16, CHANNELS),
        "weight": zeros(CHANNELS),
        "eps": 1e-6,
        "one_plus_weight": True,
        "frequencies": zeros(4),
        "attention_factor": 1.0,
        "block_size": 3,
        "key_pages": zeros(4, CHANNELS, 2),
        "page_table": np.array([[0, -1], [3, 1]], np.int32),
        **runs(),
        "dtype": "float32",
    }


def select_arguments() -> Arguments:
    return {
        "q": zeros(NUM_ROWS, 2, CHANNELS),
        "key_pages": zeros(4, CHANNELS, 2),
        "page_table": np.array([[0, -1], [3, 1]], np.int32),
        "row_slots": ids(0, 1, 1),
        "positions": ids(5, 11, 0),
        "block_size": 3,
        "budget": 6,
        "scale": 0.5,
        "dtype": "float32",
    }


def attention_arguments() -> Arguments:
    return {
        "q": zeros(2, 1, CHANNELS),
        "key_pages": zeros(2, 1, CHANNELS, 4),
        "value_pages": zeros(2, 1, 4, CHANNELS),
        "page_table": np.array([[0, 1]], np.int32),
        "row_slots": ids(0, 0),
        "row_num_keys": ids(8, 3),
        "kv_index": ids(0),
        "scale": 0.5,
        "dtype": "float32",
        "selected": np.array([[0, 4, 7], [9, 9, 9]], np.int32),
        "counts": ids(3, 0),
    }


def gates_arguments() -> Arguments:
    return {"z": zeros(NUM_ROWS, 7), "num_streams": STREAMS, "low_rank": 5}


def mix_arguments() -> Arguments:
    wide = NUM_ROWS, STREAMS * HIDDEN
    return {"y": zeros(*wide), "normed": zeros(*wide), "num_streams": STREAMS}


def write_arguments() -> Arguments:
    streams = zeros(NUM_ROWS, STREAMS * HIDDEN)
    return {"streams": streams, "y": zeros(NUM_ROWS, HIDDEN), "weights": zeros(NUM_ROWS, STREAMS)}


def ngram_arguments() -> Arguments:
    wide = NUM_ROWS, STREAMS * HIDDEN
    return {"key_normed": zeros(*wide), "query_normed": zeros(*wide), "value": zeros(NUM_ROWS, HIDDEN), "scale": 0.4}


def gated_norm_arguments() -> Arguments:
    rows = {"x": zeros(NUM_ROWS, HIDDEN), "gate": zeros(NUM_ROWS, HIDDEN), "weight": zeros(HIDDEN)}
    return {**rows, "eps": 1e-6, "activation": "silu"}


def grouped_norm_arguments() -> Arguments:
    x, weight = zeros(NUM_ROWS, STREAMS, HIDDEN), zeros(STREAMS, HIDDEN)
    return {"x": x, "weight": weight, "eps": 1e-6, "one_plus_weight": True}


def read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


GOOD: dict[Callable[[], Arguments], Any] = {
    conv_arguments: _C.causal_conv,
    deltanet_arguments: _C.deltanet,
    store_arguments: _C.store_index_keys,
    select_arguments: _C.select_keys,
    attention_arguments: _C.attention,
    gates_arguments: _C.hyper_gates,
    mix_arguments: _C.hyper_mix,
    write_arguments: _C.hyper_write,
    ngram_arguments: _C.ngram_values,
    gated_norm_arguments: _C.gated_norm,
    grouped_norm_arguments: _C.rms_norm,
}
WITH_RUNS = (conv_arguments, deltanet_arguments, store_arguments)
BAD_RUNS = [
    ("row_order", ids(0, 1, 3), "values 0 to 2, found 3"),
    ("row_order", ids(0, 1, 1), "every value once, found 1 twice"),
    ("row_order", ids(0, 1), r"found shape \[2\]"),
    ("run_slots", ids(0, SLOTS), "values 0 to 1, found 2"),
    ("run_slots", ids(1, 1), "every value once, found 1 twice"),
    ("run_starts", ids(5, -1), "found -1"),
    ("run_starts", ids(5), r"found shape \[1\]"),
    ("run_ends", ids(3, 3), "found 3"),
    ("run_ends", ids(2, 4), "found 4"),
    ("run_ends", ids(1, 2), "found 2"),
    ("run_ends", ids(0, 3), "found 0"),
]
BAD: list[tuple[Callable[[], Arguments], str, Any, str]] = [
    (conv_arguments, "x", zeros(CHANNELS), r"expected shape \[M, C\], found shape \[8\]"),
    (conv_arguments, "weight", zeros(4, CHANNELS + 1), "C=8"),
    (conv_arguments, "dilation", 0, "1 or more, found 0"),
    (conv_arguments, "dilation", 3, ""),
    (conv_arguments, "dilation", 2**62, ""),
    (conv_arguments, "ring", zeros(SLOTS, 6, CHANNELS), "found 6"),
    (conv_arguments, "ring", read_only(zeros(SLOTS, 7, CHANNELS)), "expected a writeable array"),
    (deltanet_arguments, "qkv", zeros(NUM_ROWS, 30), "found shape"),
    (deltanet_arguments, "b", zeros(NUM_ROWS, HEADS + 1), "Hv=3"),
    (deltanet_arguments, "a", zeros(NUM_ROWS + 1, HEADS), "M=3"),
    (deltanet_arguments, "a_log", zeros(HEADS + 1), "Hv=3"),
    (deltanet_arguments, "dt_bias", zeros(1), "Hv=3"),
    (deltanet_arguments, "key_index", ids(0, 1, 2), "expected values 0 to 1, found 2"),
    (deltanet_arguments, "key_index", ids(0, 1), "Hv=3"),
    (deltanet_arguments, "states", zeros(SLOTS, 3, HEADS, KEY_DIM, VALUE_DIM), "found shape"),
    (deltanet_arguments, "states", zeros(SLOTS, 2, HEADS, KEY_DIM, 0), "Dv = 0"),
    (deltanet_arguments, "states", read_only(zeros(SLOTS, 2, HEADS, KEY_DIM, VALUE_DIM)), "writeable"),
    (deltanet_arguments, "keys", zeros(SLOTS, 2, KEY_HEADS, KEY_DIM, 63), "found shape"),
    (deltanet_arguments, "keys", np.zeros((SLOTS, 2, KEY_HEADS, KEY_DIM, 64), np.uint16), "found uint16"),
    (deltanet_arguments, "updates", zeros(SLOTS, 64, HEADS, VALUE_DIM), "found shape"),
    (deltanet_arguments, "decays", zeros(SLOTS + 1, 128, HEADS), "found shape"),
    (deltanet_arguments, "dtype", "float64", "expected float32, bfloat16 or float16, found 'float64'"),
    (store_arguments, "raw", zeros(NUM_ROWS), "found shape"),
    (store_arguments, "ring", zeros(SLOTS, 2, CHANNELS), "found 2"),
    (store_arguments, "weight", zeros(CHANNELS - 1), "D=8"),
    (store_arguments, "frequencies", zeros(5), "expected at most D/2 = 4, found 5"),
    (store_arguments, "block_size", 0, "found 0"),
    (store_arguments, "key_pages", zeros(4, CHANNELS + 1, 2), "D=8"),
    (store_arguments, "key_pages", read_only(zeros(4, CHANNELS, 2)), "writeable"),
    (store_arguments, "page_table", np.array([[0, -1], [4, 1]], np.int32), "expected values 0 to 3, found 4"),
    (store_arguments, "page_table", ids(0, 1).reshape(2, 1)[:, :0].copy(), "found 0"),
    (select_arguments, "q", zeros(NUM_ROWS, CHANNELS), "found shape"),
    (select_arguments, "q", zeros(NUM_ROWS, 0, CHANNELS), "heads = 0"),
    (select_arguments, "row_slots", ids(0, 1, 2), "expected values 0 to 1, found 2"),
    (select_arguments, "positions", ids(5, -1, 0), "found -1"),
    (select_arguments, "positions", ids(8, 11, 0), "found -1"),
    (select_arguments, "positions", ids(5, 14, 0), "found 2"),
    (select_arguments, "budget", 7, "a multiple of block_size = 3, found 7"),
    (select_arguments, "budget", 0, "found 0"),
    (select_arguments, "block_size", 0, "found 0"),
    (select_arguments, "key_pages", np.zeros((4, CHANNELS, 2), np.uint16), "found uint16"),
    (attention_arguments, "selected", np.array([[0, 4, 8], [9, 9, 9]], np.int32), "found 8"),
    (attention_arguments, "selected", np.array([[0, -1, 7], [9, 9, 9]], np.int32), "found -1"),
    (attention_arguments, "selected", np.zeros((1, 3), np.int32), "M=2"),
    (attention_arguments, "counts", ids(4, 0), "expected values -1 to 3, found 4"),
    (attention_arguments, "counts", ids(3), "M=2"),
    (gates_arguments, "low_rank", 8, "found 8"),
    (gates_arguments, "low_rank", -1, "found -1"),
    (gates_arguments, "num_streams", 0, "found 0"),
    (mix_arguments, "y", zeros(NUM_ROWS, STREAMS * HIDDEN + 1), "divisible by 2, found 13"),
    (mix_arguments, "normed", zeros(NUM_ROWS, HIDDEN), "found shape"),
    (mix_arguments, "num_streams", 0, "found 0"),
    (write_arguments, "streams", zeros(NUM_ROWS, HIDDEN), "found shape"),
    (write_arguments, "y", zeros(NUM_ROWS + 1, HIDDEN), "M=3"),
    (ngram_arguments, "key_normed", zeros(NUM_ROWS, 13), "divisible by H = 6, found 13"),
    (ngram_arguments, "query_normed", zeros(NUM_ROWS, HIDDEN), "found shape"),
    (gated_norm_arguments, "gate", zeros(NUM_ROWS, HIDDEN + 1), r"the shape of x \(3, 6\), found \(3, 7\)"),
    (gated_norm_arguments, "weight", zeros(HIDDEN - 1), "N=6"),
    (gated_norm_arguments, "activation", "relu", "silu or sigmoid, found"),
    (grouped_norm_arguments, "weight", zeros(STREAMS, HIDDEN + 1), "N=6"),
    (grouped_norm_arguments, "weight", zeros(4, HIDDEN), "whole groups of 4, found 6"),
]


@pytest.mark.parametrize("good", GOOD)
def test_the_arguments_of_these_tests_are_good(good: Callable[[], Arguments]) -> None:
    GOOD[good](**good())


@pytest.mark.parametrize("good", WITH_RUNS)
@pytest.mark.parametrize(("argument", "value", "text"), BAD_RUNS)
def test_runs(good: Callable[[], Arguments], argument: str, value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{argument}: expected .*{text}"):
        GOOD[good](**{**good(), argument: value})


@pytest.mark.parametrize(("good", "argument", "value", "text"), BAD)
def test_names_argument_expected_and_found(good: Callable[[], Arguments], argument: str, value: Any, text: str) -> None:
    # Named is what a number asks too much of: the ring that a dilation would leave, the pages that positions read.
    shown_as = {"dilation": "(dilation|ring)", "positions": "(positions|page_table)", "weight": "(weight|x)"}
    with pytest.raises(ValueError, match=f"^{shown_as.get(argument, argument)}: expected .*") as caught:
        GOOD[good](**{**good(), argument: value})
    assert caught.match(text)


def test_lists_and_counts_come_together() -> None:
    arguments = attention_arguments()
    del arguments["counts"]
    with pytest.raises(ValueError, match="expected selected and counts together"):
        _C.attention(**arguments)


def test_a_refused_call_leaves_memory_as_it_was() -> None:
    arguments = deltanet_arguments()
    memory = {name: arguments[name] for name in ("states", "keys", "updates", "decays")}
    for part in memory.values():
        part[:] = 7
    with pytest.raises(ValueError, match="key_index"):
        _C.deltanet(**{**arguments, "key_index": ids(0, 1, 2)})
    assert all((part == 7).all() for part in memory.values())


def test_ranks_without_heads_have_empty_arrays() -> None:
    arguments = deltanet_arguments()
    none = {name: zeros(0) for name in ("a_log", "dt_bias")} | {"key_index": ids()}
    rows = {"qkv": zeros(NUM_ROWS, 0), "b": zeros(NUM_ROWS, 0), "a": zeros(NUM_ROWS, 0)}
    memory = {
        "states": zeros(SLOTS, 2, 0, KEY_DIM, VALUE_DIM),
        "keys": zeros(SLOTS, 2, 0, KEY_DIM, 64),
        "updates": zeros(SLOTS, 128, 0, VALUE_DIM),
        "decays": zeros(SLOTS, 128, 0),
    }
    assert _C.deltanet(**{**arguments, **none, **rows, **memory}).shape == (NUM_ROWS, 0, VALUE_DIM)
    conv = {**conv_arguments(), "x": zeros(NUM_ROWS, 0), "weight": zeros(4, 0), "ring": zeros(SLOTS, 7, 0)}
    assert _C.causal_conv(**conv).shape == (NUM_ROWS, 0)
