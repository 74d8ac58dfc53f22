"""Poison for receipts: NaN in all memory that must not be read, so that whoever reads it shows.

Weights of experts that a rank does not own, columns and blocks past the end of a packed weight, free and unwritten
pages and states of slots (memory.py), results and scratch before they are written, exchange rows of other ranks before
they come.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import _C


def set_poison(is_on: bool) -> None:
    """For this whole process, from the next allocation on."""
    _C.set_poison(is_on)
    # torch's own switch: with it, torch.empty and its like come filled with NaN (torch.utils.deterministic).
    # This one of its two names does not import torch's compiler: seconds at every start, and a folder in /tmp.
    torch.set_deterministic_debug_mode("error" if is_on else "default")


def is_on() -> bool:
    return _C.poison()


def guarded(packed: torch.Tensor, num_columns: int) -> torch.Tensor:
    """The packed weight [blocks, K, 16] with NaN before it, behind it, and in the last block's unused columns."""
    whole = torch.full((len(packed) + 2, *packed.shape[1:]), torch.nan, dtype=packed.dtype)
    whole[1:-1] = packed
    columns_in_use = num_columns - (len(packed) - 1) * _C.COLUMNS_PER_BLOCK
    whole[len(packed), :, columns_in_use:] = torch.nan
    return whole[1:-1]


def among_unowned(stacked: torch.Tensor, owned_ids: Sequence[int], num_experts: int) -> torch.Tensor:
    """[n, ...] of the owned experts -> [num_experts, ...] with each at its id, NaN in all others."""
    whole = torch.full((num_experts, *stacked.shape[1:]), torch.nan, dtype=stacked.dtype)
    whole[list(owned_ids)] = stacked
    return whole
