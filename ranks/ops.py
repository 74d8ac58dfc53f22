"""The kernels of leafsum._C on torch tensors (CPU). Views, never copies; a tensor that cannot be viewed is refused.

16-bit floats travel as their bits: numpy has no bfloat16. Shapes and orders of addition: docs/numerics.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import _C
from . import poison

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def view(tensor: torch.Tensor, dtype: torch.dtype) -> NDArray[Any]:
    """The tensor's memory as a numpy array. Raises ValueError unless it is contiguous and of `dtype`."""
    if tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"expected a contiguous {dtype} tensor on the CPU, got {tensor.dtype} {tuple(tensor.shape)} with strides "
            f"{tensor.stride()} on {tensor.device}: make it so where it is built, kernels convert nothing"
        )
    bits = tensor.view(torch.uint16) if tensor.element_size() == 2 else tensor
    return bits.numpy()


def f32(tensor: torch.Tensor) -> NDArray[np.float32]:
    return view(tensor, torch.float32)


def i32(tensor: torch.Tensor) -> NDArray[np.int32]:
    return view(tensor, torch.int32)


def storage(tensor: torch.Tensor) -> NDArray[Any]:
    """A tensor of a compute dtype, as the kernels' storage."""
    return view(tensor, TORCH_DTYPES[dtype_name(tensor)])


def dtype_name(tensor: torch.Tensor) -> str:
    if tensor.dtype not in DTYPE_NAMES:
        raise ValueError(f"expected a tensor of {', '.join(TORCH_DTYPES)}, got {tensor.dtype}")
    return DTYPE_NAMES[tensor.dtype]


def from_storage(array: NDArray[Any], dtype: str) -> torch.Tensor:
    return torch.from_numpy(array).view(TORCH_DTYPES[dtype])


def widen(x: torch.Tensor) -> torch.Tensor:
    """The FP32 values of a tensor of any compute dtype; exact."""
    return x if x.dtype == torch.float32 else torch.from_numpy(_C.widen(storage(x), dtype_name(x)))


def narrow(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """x, of any compute dtype, rounded once to `dtype`."""
    return x if x.dtype == TORCH_DTYPES[dtype] else from_storage(_C.narrow(f32(widen(x)), dtype), dtype)


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] -> [ceil(N / 16), K, 16], the same dtype."""
    dtype = dtype_name(weight)
    packed = from_storage(_C.pack_weight(storage(weight), dtype), dtype)
    return poison.guarded(packed, weight.shape[0]) if poison.is_on() else packed


def linear(
    x: torch.Tensor, packed: torch.Tensor, num_columns: int, leaf_k: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """F32 [M, K] -> F32 [M, num_columns]; leaf_k = 0: one chain over K."""
    bias_view = None if bias is None else f32(bias)
    return torch.from_numpy(_C.linear(f32(x), storage(packed), dtype_name(packed), num_columns, leaf_k, bias_view))


def linear_leaves(x: torch.Tensor, packed: torch.Tensor, num_columns: int, leaf_k: int) -> torch.Tensor:
    """F32 [M, L * leaf_k] -> F32 [M, L, num_columns], unsummed."""
    return torch.from_numpy(_C.linear_leaves(f32(x), storage(packed), dtype_name(packed), num_columns, leaf_k))


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(_C.swiglu(f32(gate), f32(up)))


def experts(
    x: torch.Tensor,
    slot_ids: torch.Tensor,
    slot_weights: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    local_index: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Fills out [M, S, H] at the slots whose id has a local index >= 0, and nothing else."""
    _C.experts(
        f32(x), i32(slot_ids), f32(slot_weights), storage(gate), storage(up), storage(down), i32(local_index),
        dtype_name(gate), f32(out),
    )  # fmt: skip


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.from_numpy(_C.rms_norm(f32(x), f32(weight), eps, False))


def rotary(
    x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor, attention_factor: float
) -> torch.Tensor:
    """F32 [M, heads, D], rotated by position."""
    return torch.from_numpy(_C.rotary(f32(x), i32(positions), f32(frequencies), attention_factor))


def router(logits: torch.Tensor, top_k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """F32 [M, E] -> ids I32 [M, top_k] ascending in a row, weights F32 [M, top_k]."""
    ids, weights = _C.router(f32(logits), top_k, renormalise)
    return torch.from_numpy(ids), torch.from_numpy(weights)


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """F32 [M, V] -> values F32 [M], ids I32 [M]; ties go to the lower id."""
    values, ids = _C.argmax(f32(logits))
    return torch.from_numpy(values), torch.from_numpy(ids)


def nonfinite_rows(x: torch.Tensor) -> torch.Tensor:
    """F32 [M, N] -> bool [M]."""
    return torch.from_numpy(_C.nonfinite_rows(f32(x)))


def residual_hash(x: torch.Tensor, positions: torch.Tensor) -> NDArray[np.uint64]:
    """F32 [M, H] -> U64 [M]: one hash a row."""
    return _C.residual_hash(f32(x), i32(positions))


def store_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    row_pages: torch.Tensor,
    row_offsets: torch.Tensor,
) -> None:
    """Rounds F32 [M, G, D] into pages."""
    _C.store_kv(
        f32(keys), f32(values), storage(key_pages), storage(value_pages), i32(row_pages), i32(row_offsets),
        dtype_name(key_pages),
    )  # fmt: skip


def attention(
    queries: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    row_num_keys: torch.Tensor,
    kv_index: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """F32 [M, heads, D] -> F32 [M, heads, D]; head h reads KV head kv_index[h] of the pages."""
    out = _C.attention(
        f32(queries), storage(key_pages), storage(value_pages), i32(page_table), i32(row_slots), i32(row_num_keys),
        i32(kv_index), scale, dtype_name(key_pages),
    )  # fmt: skip
    return torch.from_numpy(out)
