"""One call of every kernel on values that tell orders apart: each case returns the bytes of its results."""

from collections.abc import Callable
from typing import Any

import numpy as np
from leafsum import _C
from numpy.typing import NDArray

DTYPES = ("float32", "bfloat16", "float16")


def values(seed: int, *shape: int) -> np.ndarray:
    """Normal values over several magnitudes, with cancelling neighbours, -0.0 and subnormals among them."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=shape).astype(np.float32) * np.float32(10) ** generator.integers(-3, 2, shape).astype(
        np.float32
    )
    flat = x.reshape(-1)
    flat[7::11] = -flat[6::11][: flat[7::11].size]
    flat[3::29] = -0.0
    flat[5::31] = np.float32(1e-41)
    return np.ascontiguousarray(x)


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def packed(seed: int, num_columns: int, k: int, dtype: str) -> np.ndarray:
    return _C.pack_weight(_C.narrow(values(seed, num_columns, k), dtype), dtype)


def linear(dtype: str) -> bytes:
    results = []
    for num_rows, k, num_columns in ((1, 70, 130), (2, 600, 16), (3, 64, 100), (5, 33, 65), (49, 530, 83)):
        x, weight, bias = values(1, num_rows, k), packed(2, num_columns, k, dtype), values(3, num_columns)
        results += [_C.linear(x, weight, dtype, num_columns, leaf_k, bias) for leaf_k in (0, 128, 512)]
    leaves = _C.linear_leaves(values(4, 9, 96), packed(5, 70, 96, dtype), dtype, 70, 24)
    return b"".join(result.tobytes() for result in [*results, leaves])


def experts(dtype: str) -> bytes:
    num_rows, hidden, inner, num_experts, num_slots = 23, 72, 40, 6, 3
    gate, up = (np.stack([packed(seed + e, inner, hidden, dtype) for e in range(4)]) for seed in (10, 20))
    down = np.stack([packed(30 + e, hidden, inner, dtype) for e in range(4)])
    generator = np.random.default_rng(6)
    chosen = np.stack([np.sort(generator.permutation(num_experts)[:num_slots]) for _ in range(num_rows)]).astype(
        np.int32
    )
    out = np.full((num_rows, num_slots, hidden), 7, np.float32)
    weights = values(7, num_rows, num_slots)
    _C.experts(values(8, num_rows, hidden), chosen, weights, gate, up, down, ids(0, -1, 1, 2, -1, 3), dtype, out)
    return out.tobytes()


def attention(dtype: str) -> bytes:
    results = []
    for page_size, head_dim in ((64, 32), (5, 20), (300, 16)):
        num_keys, num_kv_heads, kv_index = 600, 2, ids(0, 0, 0, 1, 1)
        num_pages = -(-num_keys // page_size)
        storage = np.float32 if dtype == "float32" else np.uint16
        key_pages = np.zeros((num_pages, num_kv_heads, head_dim, page_size), storage)
        value_pages = np.zeros((num_pages, num_kv_heads, page_size, head_dim), storage)
        table = np.random.default_rng(9).permutation(num_pages).astype(np.int32)[None]
        position = np.arange(num_keys)
        k, v = (values(seed, num_keys, num_kv_heads, head_dim) for seed in (40, 41))
        pages = np.ascontiguousarray(table[0][position // page_size])
        _C.store_kv(k, v, key_pages, value_pages, pages, (position % page_size).astype(np.int32), dtype)
        results += [key_pages, value_pages]
        seen = ids(1, 15, 16, 17, 63, 64, 65, 129, 255, 256, 257, 300, 511, 513, 600, 0)
        q = values(42, len(seen), len(kv_index), head_dim)
        results.append(_C.attention(q, key_pages, value_pages, table, 0 * seen, seen, kv_index, head_dim**-0.5, dtype))
    return b"".join(result.tobytes() for result in results)


def rounding(dtype: str) -> bytes:
    x = np.arange(0, 2**32, 65521, dtype=np.uint32).view(np.float32)
    stored = _C.narrow(x, dtype)
    return _C.round_to(x, dtype).tobytes() + stored.tobytes() + _C.widen(stored, dtype).tobytes()


def rows() -> bytes:
    x = values(50, 19, 130)
    results: list[NDArray[Any]] = [_C.rms_norm(x, values(51, 130), 1e-6, flag) for flag in (False, True)]
    positions = np.arange(19, dtype=np.int32) * 5003
    frequencies = (10000.0 ** (-np.arange(24) / 24)).astype(np.float32)
    results.append(_C.rotary(values(52, 19, 3, 60), positions, frequencies, 1.25))
    results += [*_C.router(x, 9, True), *_C.router(x, 9, False), *_C.argmax(x)]
    x[4, 100], x[9, 0] = np.inf, np.nan
    results += [_C.nonfinite_rows(x), _C.residual_hash(x, positions)]
    return b"".join(result.tobytes() for result in results)


def functions() -> bytes:
    x = np.arange(0, 2**32, 65521, dtype=np.uint32).view(np.float32)
    results = [function(x) for function in (_C.exp, _C.log, _C.sin, _C.cos, _C.sigmoid, _C.softplus)]
    return b"".join(result.tobytes() for result in [*results, _C.swiglu(values(60, 999), values(61, 999))])


def tree() -> bytes:
    num_rows, num_ids, num_slots, hidden = 7, 43, 9, 700
    generator = np.random.default_rng(11)
    chosen = np.stack([np.sort(generator.permutation(num_ids + 1)[:num_slots]) for _ in range(num_rows)]).astype(
        np.int32
    )
    slot_rows, given = values(70, num_rows, num_slots, hidden), values(71, num_rows, 2, hidden)
    wanted = ids(1, 2, 3, 7, 8, 13)
    nothing = _C.tree_nodes(slot_rows, chosen, num_ids, 8, True, ids(), values(0, num_rows, 0, hidden), wanted)
    return nothing.tobytes() + _C.tree_nodes(slot_rows, chosen, num_ids, 8, True, ids(5, 8), given, wanted).tobytes()


CASES: dict[str, Callable[[], bytes]] = {"rows": rows, "functions": functions, "tree": tree}
for name, case in (("linear", linear), ("experts", experts), ("attention", attention), ("rounding", rounding)):
    for dtype in DTYPES:
        CASES[f"{name}-{dtype}"] = lambda case=case, dtype=dtype: case(dtype)  # type: ignore[misc]
