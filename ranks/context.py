"""What a model must know of the rank it is built for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ..collectives.control_names import CONTROLS, NO_CONTROL, PARTIAL_SUMS
from ..collectives.controls import ControlExchange
from ..collectives.exchange import Exchange
from ..collectives.hazards import HazardCounts
from ..collectives.placement import Placement
from ..collectives.transport import Transport
from ..collectives.tree import CanonicalTree


@dataclass(frozen=True, slots=True)
class RankContext:
    """One rank of `num_ranks`. Whatever stands here keeps bits, but the compute dtype and a control.

    `dtype` "float32", "bfloat16" or "float16"; `exchange` "slots", "nodes" or "auto"; `placement` of the experts, as
    Placement.named reads it. Attention heads are always placed contiguously, so that a rank keeps few KV heads.
    `layer_digests`, `control` and `hazards` are what a receipt asks for.
    """

    rank: int
    num_ranks: int
    dtype: str
    exchange: str
    placement: str
    transport: Transport
    layer_digests: bool = False
    control: str = NO_CONTROL
    hazards: HazardCounts | None = None

    def expert_exchange(self, num_experts: int, top_k: int, *, has_shared: bool) -> Exchange:
        tree = CanonicalTree(num_experts, has_shared=has_shared)
        return self._exchange(Placement.named(self.placement, tree, self.num_ranks), top_k, CONTROLS)

    def head_exchange(self, num_leaves: int) -> Exchange:
        """Of a row-split projection: every leaf is one id and is chosen in every row."""
        tree = CanonicalTree(num_leaves, ids_per_leaf=1)
        return self._exchange(Placement.contiguous(tree, self.num_ranks), num_leaves, PARTIAL_SUMS)

    def _exchange(self, placement: Placement, top_k: int, controls: Collection[str]) -> Exchange:
        """The canonical one, unless the control of this run is one that applies here."""
        if self.control in controls:
            return ControlExchange(self.control, placement, self.rank, self.transport, self.exchange, top_k)
        return Exchange(placement, self.rank, self.transport, self.exchange, top_k, self.hazards)
