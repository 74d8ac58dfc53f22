"""The paged key-value store of one rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .ops import TORCH_DTYPES, Stored


class KVPages:
    """Pages of every layer, for the KV heads this rank keeps, in the compute dtype.

    keys[layer] [num_pages, num_kv_heads, head_dim, page_size]; values[layer] [num_pages, num_kv_heads, page_size,
    head_dim]: a query's product with the keys of a page, and the sum over its values, both run along memory.
    Pages come uninitialised: a position is written before any row can see it.
    """

    def __init__(
        self, num_layers: int, num_pages: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: str
    ) -> None:
        self.page_size = page_size
        key_shape = (num_pages, num_kv_heads, head_dim, page_size)
        value_shape = (num_pages, num_kv_heads, page_size, head_dim)
        self.keys = [Stored.of(torch.empty(key_shape, dtype=TORCH_DTYPES[dtype])) for _ in range(num_layers)]
        self.values = [Stored.of(torch.empty(value_shape, dtype=TORCH_DTYPES[dtype])) for _ in range(num_layers)]

    def fill_nan(self) -> None:
        """Poison: whoever reads a position that was not written gets NaN."""
        for pages in (*self.keys, *self.values):
            pages.tensor.fill_(torch.nan)

    def fill_nan_in(self, page_ids: Sequence[int]) -> None:
        """Poison of pages that are free again: what their last owner wrote is nobody's any more."""
        for pages in (*self.keys, *self.values):
            pages.tensor[list(page_ids)] = torch.nan
