"""What a rank keeps of its requests between steps: pages of keys and values, states of slots.

Memory comes uninitialised: nothing is read of a position before a row has written it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .ops import TORCH_DTYPES, Stored

UNWRITTEN_TOKEN = -(2**40)
"""Poison for token ids: no n-gram of it is one that a prompt could hold."""


@dataclass(frozen=True, slots=True)
class MemorySizes:
    """How much of it: a page holds page_size positions of one slot, in every layer."""

    num_slots: int
    num_pages: int
    page_size: int
    dtype: str

    def empty(self, *shape: int) -> torch.Tensor:
        """In the compute dtype."""
        return torch.empty(shape, dtype=TORCH_DTYPES[self.dtype])


class BlockMemory:
    """The memory of one block of one layer. Paged tensors are [num_pages, ...], those of slots [num_slots, ...]."""

    def paged(self) -> Sequence[torch.Tensor]:
        return ()

    def of_slots(self) -> Sequence[torch.Tensor]:
        return ()

    def fill_nan(self) -> None:
        """Poison: whoever reads what was not written gets NaN."""
        for tensor in (*self.paged(), *self.of_slots()):
            tensor.fill_(poison_of(tensor))

    def fill_nan_in(self, slot_id: int, page_ids: Sequence[int]) -> None:
        """Poison of a slot and of pages that are free again: what their last owner wrote is nobody's any more."""
        for tensor in self.paged():
            tensor[list(page_ids)] = poison_of(tensor)
        for tensor in self.of_slots():
            tensor[slot_id] = poison_of(tensor)


def poison_of(tensor: torch.Tensor) -> float:
    return torch.nan if tensor.is_floating_point() else UNWRITTEN_TOKEN


class KVPages(BlockMemory):
    """Keys and values of one attention layer, for the KV heads this rank keeps, in the compute dtype.

    keys [num_pages, num_kv_heads, head_dim, page_size]; values [num_pages, num_kv_heads, page_size, head_dim]: a
    query's product with the keys of a page, and the sum over its values, both run along memory.
    """

    def __init__(self, sizes: MemorySizes, num_kv_heads: int, head_dim: int) -> None:
        self.keys = Stored.of(sizes.empty(sizes.num_pages, num_kv_heads, head_dim, sizes.page_size))
        self.values = Stored.of(sizes.empty(sizes.num_pages, num_kv_heads, sizes.page_size, head_dim))

    def paged(self) -> Sequence[torch.Tensor]:
        return self.keys.tensor, self.values.tensor


class ModelMemory(BlockMemory):
    """The memory of all blocks of a model."""

    def __init__(self, blocks: Sequence[BlockMemory]) -> None:
        self.blocks = blocks

    def paged(self) -> Sequence[torch.Tensor]:
        return [tensor for block in self.blocks for tensor in block.paged()]

    def of_slots(self) -> Sequence[torch.Tensor]:
        return [tensor for block in self.blocks for tensor in block.of_slots()]
