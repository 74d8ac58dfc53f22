"""What a model must know of the rank it is built for."""

from __future__ import annotations

from dataclasses import dataclass

from ..collectives.exchange import Exchange
from ..collectives.placement import Placement
from ..collectives.transport import Transport
from ..collectives.tree import CanonicalTree


@dataclass(frozen=True, slots=True)
class RankContext:
    """One rank of `num_ranks`. Whatever stands here keeps bits, but the compute dtype.

    `dtype` "float32", "bfloat16" or "float16"; `exchange` "slots", "nodes" or "auto"; `placement` of the experts, as
    Placement.named reads it. Attention heads are always placed contiguously, so that a rank keeps few KV heads.
    """

    rank: int
    num_ranks: int
    dtype: str
    exchange: str
    placement: str
    transport: Transport

    def expert_exchange(self, num_experts: int, top_k: int) -> Exchange:
        tree = CanonicalTree(num_experts)
        placement = Placement.named(self.placement, tree, self.num_ranks)
        return Exchange(placement, self.rank, self.transport, self.exchange, top_k)

    def attention_exchange(self, num_leaves: int) -> Exchange:
        """Every leaf is one id and is chosen in every row."""
        tree = CanonicalTree(num_leaves, ids_per_leaf=1)
        placement = Placement.contiguous(tree, self.num_ranks)
        return Exchange(placement, self.rank, self.transport, self.exchange, num_leaves)
