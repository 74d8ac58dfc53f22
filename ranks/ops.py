"""The kernels of leafsum._C on torch tensors (CPU). Views, never copies; a tensor that cannot be viewed is refused.

16-bit floats travel as their bits: numpy has no bfloat16. Shapes and orders of addition: docs/numerics.md. A decode
step makes some hundred of these calls, so they check nothing that the kernels check themselves (dtype, layout, shape).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import _C
from . import poison
from .rows import StepRows

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


def split_columns(x: torch.Tensor, *widths: int) -> list[torch.Tensor]:
    """[M, sum of widths] -> one tensor a width, each contiguous. By numpy: its slices cost a fifth of torch's."""
    values, ends = x.numpy(), itertools.accumulate(widths)
    parts = [values[:, end - width : end] for end, width in zip(ends, widths, strict=True)]
    return [torch.from_numpy(np.ascontiguousarray(part)) for part in parts]


def append_column(x: torch.Tensor, column: torch.Tensor | int) -> torch.Tensor:
    """[M, N], and [M, 1] or one value for all rows -> [M, N + 1]."""
    values = x.numpy()
    wider = np.empty((values.shape[0], values.shape[1] + 1), dtype=values.dtype)
    wider[:, :-1] = values
    wider[:, -1:] = column if isinstance(column, int) else column.numpy()
    return torch.from_numpy(wider)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One addition an element. By numpy: torch's dispatch costs several times what a row does."""
    return torch.from_numpy(np.add(x.numpy(), y.numpy()))


def sigmoid_times(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate), of one shape."""
    return torch.from_numpy(_C.sigmoid_times(x.numpy(), gate.numpy()))


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(_C.sigmoid(x.numpy()))


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


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, is_offset: bool) -> torch.Tensor:
    """x [..., N], weight [N]; or x [M, groups * N], weight [groups, N]. is_offset: one is added to the weights."""
    values, weights = x.numpy(), weight.numpy()
    if weights.ndim == 1:
        return torch.from_numpy(_C.rms_norm(values, weights, eps, is_offset))
    vectors = values.reshape(-1, weights.shape[1])
    return torch.from_numpy(_C.rms_norm(vectors, weights, eps, is_offset).reshape(values.shape))


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, activation: str) -> torch.Tensor:
    """The RMSNorm of x [..., N], times the activation ("silu", "sigmoid") of gate, of x's shape."""
    return torch.from_numpy(_C.gated_norm(x.numpy(), gate.numpy(), weight.numpy(), eps, activation))


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


@dataclass(frozen=True, slots=True)
class Selection:
    """The keys that rows see of theirs: positions I32 [M, W]; counts I32 [M], 0 for a row that sees all.

    -1 for a row that can choose none, since a score is NaN: its outputs will be NaN.
    """

    positions: NDArray[np.int32]
    counts: NDArray[np.int32]


def attention(
    queries: torch.Tensor,
    key_pages: Stored,
    value_pages: Stored,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    row_num_keys: torch.Tensor,
    kv_index: torch.Tensor,
    scale: float,
    selection: Selection | None,
) -> torch.Tensor:
    """F32 [M, heads, D] -> F32 [M, heads, D]; head h reads KV head kv_index[h] of the pages."""
    selected, counts = (None, None) if selection is None else (selection.positions, selection.counts)
    out = _C.attention(
        queries.numpy(), key_pages.bits, value_pages.bits, page_table.numpy(), row_slots.numpy(),
        row_num_keys.numpy(), kv_index.numpy(), scale, key_pages.dtype, selected, counts,
    )  # fmt: skip
    return torch.from_numpy(out)


def store_index_keys(
    raw: torch.Tensor,
    ring: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    is_offset: bool,
    frequencies: torch.Tensor,
    attention_factor: float,
    block_size: int,
    pages: Stored,
    rows: StepRows,
) -> None:
    """Keeps raw index keys F32 [M, D] in the ring, and pools those of every block that is now complete into pages."""
    _C.store_index_keys(
        raw.numpy(), ring.numpy(), norm_weight.numpy(), eps, is_offset, frequencies.numpy(), attention_factor,
        block_size, pages.bits, rows.page_table.numpy(), *rows.runs.arguments, pages.dtype,
    )  # fmt: skip


def select_keys(
    queries: torch.Tensor, pages: Stored, block_size: int, budget: int, scale: float, rows: StepRows
) -> Selection:
    """Index queries F32 [M, heads, D] -> the keys of each row's best blocks and of its unfinished one."""
    positions, counts = _C.select_keys(
        queries.numpy(), pages.bits, rows.page_table.numpy(), rows.slots.numpy(), rows.positions.numpy(), block_size,
        budget, scale, pages.dtype,
    )  # fmt: skip
    return Selection(positions, counts)


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, dilation: int, ring: torch.Tensor, rows: StepRows
) -> torch.Tensor:
    """F32 [M, C], weight [taps, C], oldest tap first -> F32 [M, C], silu included; the ring takes the inputs."""
    out = _C.causal_conv(x.numpy(), weight.numpy(), dilation, ring.numpy(), *rows.runs.arguments)
    return torch.from_numpy(out)


def deltanet(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    key_index: torch.Tensor,
    states: torch.Tensor,
    keys: Stored,
    updates: torch.Tensor,
    decays: torch.Tensor,
    scale: float,
    rows: StepRows,
) -> torch.Tensor:
    """Gated DeltaNet: F32 [M, 2 * Hk * Dk + Hv * Dv] -> F32 [M, Hv, Dv]; value head h uses key head key_index[h]."""
    out = _C.deltanet(
        qkv.numpy(), b.numpy(), a.numpy(), a_log.numpy(), dt_bias.numpy(), key_index.numpy(), states.numpy(), keys.bits,
        updates.numpy(), decays.numpy(), *rows.runs.arguments, scale, keys.dtype,
    )  # fmt: skip
    return torch.from_numpy(out)


def hyper_gates(z: torch.Tensor, num_streams: int, low_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """F32 [M, low_rank + n] -> the mixer's inner values [M, low_rank], injection weights [M, n]."""
    inner, inject = _C.hyper_gates(z.numpy(), num_streams, low_rank)
    return torch.from_numpy(inner), torch.from_numpy(inject)


def hyper_mix(y: torch.Tensor, normed: torch.Tensor, num_streams: int) -> torch.Tensor:
    """F32 [M, S * H] twice -> F32 [M, H]."""
    return torch.from_numpy(_C.hyper_mix(y.numpy(), normed.numpy(), num_streams))


def hyper_write(streams: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """F32 [M, S * H], [M, H], [M, S] -> F32 [M, S * H]."""
    return torch.from_numpy(_C.hyper_write(streams.numpy(), y.numpy(), weights.numpy()))


def ngram_values(keys: torch.Tensor, queries: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Normed keys and queries F32 [M, S * H], value [M, H] -> F32 [M, S * H]."""
    return torch.from_numpy(_C.ngram_values(keys.numpy(), queries.numpy(), value.numpy(), scale))
