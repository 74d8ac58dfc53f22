"""The kernels of leafsum._C on torch tensors (CPU). Views, never copies; a tensor that cannot be viewed is refused.

16-bit floats travel as their bits: numpy has no bfloat16. Shapes and orders of addition: docs/numerics.md. A decode
step makes some hundred of these calls, so they check nothing that the kernels check themselves (dtype, layout, shape).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import _C
from . import poison

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def storage(tensor: torch.Tensor) -> NDArray[Any]:
    """A tensor of a compute dtype, as the kernels' storage."""
    dtype_name(tensor)
    bits = tensor.view(torch.uint16) if tensor.element_size() == 2 else tensor
    return bits.numpy()


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a compute dtype that stays where it is: a packed weight, KV pages.

    `bits` is the same memory as kernels take it, viewed once: each time anew would cost more than a small kernel.
    """

    tensor: torch.Tensor
    bits: NDArray[Any]
    dtype: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Stored:
        return cls(tensor, storage(tensor), dtype_name(tensor))


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
    return x if x.dtype == TORCH_DTYPES[dtype] else from_storage(_C.narrow(widen(x).numpy(), dtype), dtype)


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] -> [ceil(N / 16), K, 16], the same dtype."""
    dtype = dtype_name(weight)
    packed = from_storage(_C.pack_weight(storage(weight), dtype), dtype)
    return poison.guarded(packed, weight.shape[0]) if poison.is_on() else packed


def linear(x: torch.Tensor, packed: Stored, num_columns: int, leaf_k: int, bias: torch.Tensor | None) -> torch.Tensor:
    """F32 [M, K] -> F32 [M, num_columns]; leaf_k = 0: one chain over K."""
    bias_view = None if bias is None else bias.numpy()
    return torch.from_numpy(_C.linear(x.numpy(), packed.bits, packed.dtype, num_columns, leaf_k, bias_view))


def linear_leaves(x: torch.Tensor, packed: Stored, num_columns: int, leaf_k: int) -> torch.Tensor:
    """F32 [M, L * leaf_k] -> F32 [M, L, num_columns], unsummed."""
    return torch.from_numpy(_C.linear_leaves(x.numpy(), packed.bits, packed.dtype, num_columns, leaf_k))


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One addition an element. By numpy: torch's dispatch costs several times what a row does."""
    return torch.from_numpy(np.add(x.numpy(), y.numpy()))


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(_C.swiglu(gate.numpy(), up.numpy()))


def experts(
    x: torch.Tensor,
    slot_ids: torch.Tensor,
    slot_weights: torch.Tensor,
    gate: Stored,
    up: Stored,
    down: Stored,
    local_index: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Fills out [M, S, H] at the slots whose id has a local index >= 0, and nothing else."""
    _C.experts(
        x.numpy(), slot_ids.numpy(), slot_weights.numpy(), gate.bits, up.bits, down.bits, local_index.numpy(),
        gate.dtype, out.numpy(),
    )  # fmt: skip


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.from_numpy(_C.rms_norm(x.numpy(), weight.numpy(), eps, False))


def rotary(
    x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor, attention_factor: float
) -> torch.Tensor:
    """F32 [M, heads, D], rotated by position."""
    return torch.from_numpy(_C.rotary(x.numpy(), positions.numpy(), frequencies.numpy(), attention_factor))


def router(logits: torch.Tensor, top_k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """F32 [M, E] -> ids I32 [M, top_k] ascending in a row, weights F32 [M, top_k]."""
    ids, weights = _C.router(logits.numpy(), top_k, renormalise)
    return torch.from_numpy(ids), torch.from_numpy(weights)


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """F32 [M, V] -> values F32 [M], ids I32 [M]; ties go to the lower id."""
    values, ids = _C.argmax(logits.numpy())
    return torch.from_numpy(values), torch.from_numpy(ids)


def nonfinite_rows(x: torch.Tensor) -> NDArray[np.bool_]:
    """F32 [M, N] -> [M]."""
    return _C.nonfinite_rows(x.numpy())


def residual_hash(x: torch.Tensor, positions: torch.Tensor) -> NDArray[np.uint64]:
    """F32 [M, H] -> U64 [M]: one hash a row."""
    return _C.residual_hash(x.numpy(), positions.numpy())


def store_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_pages: Stored,
    value_pages: Stored,
    row_pages: torch.Tensor,
    row_offsets: torch.Tensor,
) -> None:
    """Rounds F32 [M, G, D] into pages."""
    _C.store_kv(
        keys.numpy(), values.numpy(), key_pages.bits, value_pages.bits, row_pages.numpy(), row_offsets.numpy(),
        key_pages.dtype,
    )  # fmt: skip


def attention(
    queries: torch.Tensor,
    key_pages: Stored,
    value_pages: Stored,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    row_num_keys: torch.Tensor,
    kv_index: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """F32 [M, heads, D] -> F32 [M, heads, D]; head h reads KV head kv_index[h] of the pages."""
    out = _C.attention(
        queries.numpy(), key_pages.bits, value_pages.bits, page_table.numpy(), row_slots.numpy(),
        row_num_keys.numpy(), kv_index.numpy(), scale, key_pages.dtype,
    )  # fmt: skip
    return torch.from_numpy(out)
