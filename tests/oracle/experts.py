"""Expert rows and slot values of docs/numerics.md section 3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oracle.fl32 import mul
from oracle.functions import silu
from oracle.linear import wide
from oracle.rounding import Storage

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Expert:
    """One gated MLP; gate and up [I, H], down [H, I], storage of the compute dtype."""

    gate: Storage
    up: Storage
    down: Storage


def swiglu(gate: F32, up: F32) -> F32:
    """fl32(silu(gate) * up)."""
    return mul(silu(gate), up)


def expert_row(x: F32, expert: Expert, dtype: str) -> F32:
    """x [M, H] -> y [M, H]; each linear rounds its input to dtype."""
    hidden = swiglu(wide(x, expert.gate, dtype), wide(x, expert.up, dtype))
    return wide(hidden, expert.down, dtype)


def slot_values(
    x: F32, slot_ids: I32, slot_weights: F32, experts: Sequence[Expert | None], dtype: str, out: F32
) -> None:
    """out[m, s] = fl32(w * y) wherever experts[id] is here; every other row of out [M, S, H] stays as it is."""
    for expert_id, expert in enumerate(experts):
        rows, slots = np.nonzero(slot_ids == expert_id)
        if expert is not None and len(rows):
            out[rows, slots] = mul(slot_weights[rows, slots][:, None], expert_row(x[rows], expert, dtype))
