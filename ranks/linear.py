"""Linear layers of the three kinds of docs/numerics.md section 2. Its role alone decides which a projection is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import ops

NARROW_LEAF_K = 512


@dataclass(frozen=True, slots=True)
class Linear:
    """A packed weight [ceil(N / 16), K, 16] in the compute dtype. The constructors below name the kinds."""

    packed: ops.Stored
    num_columns: int
    leaf_k: int
    bias: torch.Tensor | None = None

    @classmethod
    def wide(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """weight [N, K] in the compute dtype, bias FP32 [N]. One chain over the whole of K."""
        return cls(ops.Stored.of(ops.pack_weight(weight)), weight.shape[0], 0, bias)

    @classmethod
    def narrow(cls, weight: torch.Tensor) -> Linear:
        """Leaves of 512 elements of K, added ascending."""
        return cls(ops.Stored.of(ops.pack_weight(weight)), weight.shape[0], NARROW_LEAF_K)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """F32 [M, K] -> F32 [M, N]."""
        return ops.linear(x, self.packed, self.num_columns, self.leaf_k, self.bias)


@dataclass(frozen=True, slots=True)
class RowSplitLinear:
    """The leaves of a row-split projection that one rank owns; the exchange adds them, a bias comes after that."""

    packed: ops.Stored
    num_columns: int
    leaf_k: int

    @classmethod
    def of(cls, weight: torch.Tensor, num_leaves: int) -> RowSplitLinear:
        """weight [N, num_leaves * leaf_k]: the columns of this rank's leaves."""
        return cls(ops.Stored.of(ops.pack_weight(weight)), weight.shape[0], weight.shape[1] // num_leaves)

    def leaves(self, x: torch.Tensor) -> torch.Tensor:
        """F32 [M, num_leaves * leaf_k] -> F32 [M, num_leaves, N], unsummed."""
        return ops.linear_leaves(x, self.packed, self.num_columns, self.leaf_k)
