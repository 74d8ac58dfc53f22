"""pack_weight, linear and linear_leaves are the oracle's, for odd shapes, every dtype and kind of number."""

from __future__ import annotations

import numpy as np
import pytest
from bits import assert_same_bits, bit_patterns
from leafsum import _C
from machines import machines
from oracle.inputs import KINDS, numbers, weights
from oracle.linear import COLUMNS_PER_BLOCK, narrow_linear, pack, row_split_leaves, wide
from oracle.rounding import DTYPES

SHAPES = [(1, 1, 1), (2, 31, 17), (5, 64, 16), (17, 40, 33), (3, 513, 15), (2, 1100, 40)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_columns", [1, 15, 16, 17, 40])
def test_pack_weight(dtype: str, num_columns: int) -> None:
    weight = weights("weight", (num_columns, 23), dtype, "special")
    assert _C.COLUMNS_PER_BLOCK == COLUMNS_PER_BLOCK
    for _ in machines():
        assert_same_bits(_C.pack_weight(weight, dtype), pack(weight))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "num_k", "num_columns"), SHAPES)
def test_wide(kind: str, dtype: str, num_rows: int, num_k: int, num_columns: int) -> None:
    x, weight = numbers("x", (num_rows, num_k), kind), weights("weight", (num_columns, num_k), dtype, kind)
    expected, packed = wide(x, weight, dtype), pack(weight)
    for _ in machines():
        assert_same_bits(_C.linear(x, packed, dtype, num_columns, 0, None), expected, any_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_k", "leaf_k"), [(8, 512), (512, 512), (513, 512), (1100, 512), (40, 16)])
def test_narrow(kind: str, dtype: str, num_k: int, leaf_k: int) -> None:
    x, weight = numbers("x", (3, num_k), kind), weights("weight", (19, num_k), dtype, kind)
    expected, packed = narrow_linear(x, weight, dtype, leaf_k=leaf_k), pack(weight)
    for _ in machines():
        assert_same_bits(_C.linear(x, packed, dtype, 19, leaf_k, None), expected, any_nan=True)


@pytest.mark.parametrize("leaf_k", [0, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_is_added_once_and_last(dtype: str, leaf_k: int) -> None:
    x, weight = numbers("x", (4, 40), "mixed"), weights("weight", (21, 40), dtype)
    bias, packed = numbers("bias", (21,), "mixed"), pack(weight)
    expected = narrow_linear(x, weight, dtype, bias, leaf_k) if leaf_k else wide(x, weight, dtype, bias)
    for _ in machines():
        assert_same_bits(_C.linear(x, packed, dtype, 21, leaf_k, bias), expected, any_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_leaves", "leaf_k"), [(1, 24), (4, 16), (8, 33)])
def test_row_split_leaves(kind: str, dtype: str, num_leaves: int, leaf_k: int) -> None:
    num_k = num_leaves * leaf_k
    x, weight = numbers("x", (3, num_k), kind), weights("weight", (18, num_k), dtype, kind)
    expected, packed = row_split_leaves(x, weight, dtype, leaf_k), pack(weight)
    for _ in machines():
        assert_same_bits(_C.linear_leaves(x, packed, dtype, 18, leaf_k), expected, any_nan=True)


TILE_BORDERS = (2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 18, 19, 25)
PIECE_BORDERS = ((13, 128, 16), (19, 129, 65), (19, 257, 129), (25, 384, 17), (97, 130, 128))


@pytest.mark.parametrize("dtype", DTYPES)
def test_borders_of_row_tiles(dtype: str) -> None:
    """Rows as tiles of every size take them, over columns that no tile divides."""
    x, weight = numbers("x", (max(TILE_BORDERS), 37), "mixed"), weights("weight", (150, 37), dtype, "mixed")
    expected, packed = wide(x, weight, dtype), pack(weight)
    for name in machines():
        for num_rows in TILE_BORDERS:
            found = _C.linear(x[:num_rows], packed, dtype, 150, 0, None)
            assert np.array_equal(bit_patterns(found), bit_patterns(expected[:num_rows])), f"{num_rows} rows, {name}"


@pytest.mark.parametrize("leaf_k", [0, 100])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "num_k", "num_columns"), PIECE_BORDERS)
def test_borders_of_pieces_of_k(dtype: str, leaf_k: int, num_rows: int, num_k: int, num_columns: int) -> None:
    """Many rows go through K in pieces, of 128 or 256 steps, and a task has 96 rows and 128 columns."""
    x, weight = numbers("x", (num_rows, num_k), "mixed"), weights("weight", (num_columns, num_k), dtype, "mixed")
    expected, packed = narrow_linear(x, weight, dtype, leaf_k=leaf_k or num_k), pack(weight)
    for _ in machines():
        assert_same_bits(_C.linear(x, packed, dtype, num_columns, leaf_k, None), expected)


def test_the_order_along_k_shows() -> None:
    x, weight = numbers("x", (4, 300), "mixed"), numbers("weight", (20, 300))
    backwards = np.ascontiguousarray(x[:, ::-1]), pack(np.ascontiguousarray(weight[:, ::-1]))
    other = _C.linear(*backwards, "float32", 20, 0, None)
    assert (other != wide(x, weight, "float32")).any(), "these numbers must be able to tell one order from another"
