"""The mixture of experts: router on every rank, owned experts, and the exchange over the canonical tree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ...collectives.exchange import Exchange
from ...collectives.hazards import HazardCounts
from .. import ops, poison
from ..linear import Linear
from ..spec import ModelSpec
from ..weights import Weights


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """gate, up [n, ceil(I/16), H, 16] and down [n, ceil(H/16), I, 16]: the n experts of one width that a rank owns.

    local_index I32 [ids]: 0..n-1 for an owned id, -1 elsewhere.
    """

    gate: ops.Stored
    up: ops.Stored
    down: ops.Stored
    local_index: torch.Tensor

    @classmethod
    def of(cls, packed: list[list[torch.Tensor]], owned_ids: tuple[int, ...], num_ids: int) -> ExpertStack:
        """`packed`: gate, up and down of each owned id, ascending."""
        gate, up, down = (torch.stack([expert[part] for expert in packed]) for part in range(3))
        local_index = torch.full((num_ids,), -1, dtype=torch.int32)
        local_index[list(owned_ids)] = torch.arange(len(owned_ids), dtype=torch.int32)
        if poison.is_on():
            gate, up, down = (poison.among_unowned(part, owned_ids, num_ids) for part in (gate, up, down))
            local_index[list(owned_ids)] = torch.tensor(owned_ids, dtype=torch.int32)
        return cls(ops.Stored.of(gate), ops.Stored.of(up), ops.Stored.of(down), local_index)

    def fill(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, slot_rows: torch.Tensor) -> None:
        """Slot values of owned ids into slot_rows [M, S, H], and nothing else."""
        ops.experts(x, ids, weights, self.gate, self.up, self.down, self.local_index, slot_rows)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """Every row's expert, id `expert_id`; `own` on its owner alone. gate: a narrow linear to one column."""

    gate: Linear
    own: ExpertStack | None
    expert_id: int

    @classmethod
    def load(cls, weights: Weights, spec: ModelSpec, is_owned: bool) -> SharedExpert:
        own = None
        if is_owned:
            packed = [ops.pack_weight(weight) for weight in _read_gated(weights.under("shared_expert."))]
            own = ExpertStack.of([packed], (spec.num_experts,), spec.num_experts + 1)
        return cls(Linear.narrow(weights.linear("shared_expert_gate.weight")), own, spec.num_experts)


@dataclass(frozen=True, slots=True)
class Experts:
    """`own` is None on a rank that has none of the routed experts."""

    router: Linear
    own: ExpertStack | None
    shared: SharedExpert | None
    exchange: Exchange
    top_k: int
    renormalise: bool

    @classmethod
    def load(cls, weights: Weights, spec: ModelSpec, exchange: Exchange) -> Experts:
        num_ids = exchange.placement.tree.num_all_ids
        owned_ids = exchange.placement.ids_of(exchange.rank)
        routed_ids = tuple(id_ for id_ in owned_ids if id_ < spec.num_experts)
        packed = [_read_packed(weights.under("experts."), spec, expert) for expert in routed_ids]
        return cls(
            router=Linear.narrow(weights.linear("gate.weight")),
            own=ExpertStack.of(packed, routed_ids, num_ids) if routed_ids else None,
            shared=SharedExpert.load(weights, spec, routed_ids != owned_ids) if spec.shared_width else None,
            exchange=exchange,
            top_k=spec.top_k,
            renormalise=spec.renormalise,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """F32 [M, H] -> F32 [M, H], equal on every rank."""
        logits = self.router(x)
        ids, weights = ops.router(logits, self.top_k, self.renormalise)
        if self.exchange.hazards is not None:
            self._count_ties(self.exchange.hazards, logits, ids)
        if self.shared is not None:
            ids = ops.append_column(ids, self.shared.expert_id)
            weights = ops.append_column(weights, ops.sigmoid(self.shared.gate(x)))
        # Only owned slots are ever written, and the exchange reads no others.
        slot_rows = torch.empty((*ids.shape, x.shape[1]))
        if self.own is not None:
            self.own.fill(x, ids, weights, slot_rows)
        if self.shared is not None and self.shared.own is not None:
            self.shared.own.fill(x, ids, weights, slot_rows)
        return self.exchange.sum(slot_rows, ids, weights)

    def _count_ties(self, hazards: HazardCounts, logits: torch.Tensor, ids: torch.Tensor) -> None:
        _, probabilities = ops.router(logits, logits.shape[1], renormalise=False)
        owners = np.array(self.exchange.placement.owners[: logits.shape[1]], dtype=np.int32)
        hazards.count_ties(probabilities.numpy(), ids.numpy(), owners)


def _read_packed(weights: Weights, spec: ModelSpec, expert: int) -> list[torch.Tensor]:
    """Packed gate, up and down of one expert, from either published layout."""
    if weights.has("gate_up_proj"):
        row = (expert, expert + 1)
        gate_up = weights.linear("gate_up_proj", rows=row)[0]
        down = weights.linear("down_proj", rows=row)[0]
        parts = [gate_up[: spec.expert_width], gate_up[spec.expert_width :], down]
    else:
        parts = _read_gated(weights.under(f"{expert}."))
    return [ops.pack_weight(weight) for weight in parts]


def _read_gated(weights: Weights) -> list[torch.Tensor]:
    return [weights.linear(f"{part}_proj.weight") for part in ("gate", "up", "down")]
