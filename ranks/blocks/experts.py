"""The mixture of experts: router on every rank, owned experts, and the exchange over the canonical tree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ...collectives.exchange import Exchange
from ...collectives.hazards import HazardCounts
from .. import ops, poison
from ..linear import Linear
from ..sizes import fused_experts, layer_name
from ..spec import ModelSpec
from ..weights import WeightReader


@dataclass(frozen=True, slots=True)
class Experts:
    """gate, up [n, ceil(I/16), H, 16] and down [n, ceil(H/16), I, 16]: the n experts this rank owns, ascending id.

    local_index I32 [E]: 0..n-1 for an owned id, -1 elsewhere.
    """

    router: Linear
    gate: ops.Stored
    up: ops.Stored
    down: ops.Stored
    local_index: torch.Tensor
    exchange: Exchange
    top_k: int
    renormalise: bool

    @classmethod
    def load(
        cls, reader: WeightReader, spec: ModelSpec, layer: int, owned_ids: tuple[int, ...], exchange: Exchange
    ) -> Experts:
        owned = [_read_expert(reader, spec, layer, expert) for expert in owned_ids]
        local_index = torch.full((spec.num_experts,), -1, dtype=torch.int32)
        local_index[list(owned_ids)] = torch.arange(len(owned_ids), dtype=torch.int32)
        gate, up, down = (_stack([expert[part] for expert in owned]) for part in range(3))
        if poison.is_on() and owned_ids:
            gate, up, down = (poison.among_unowned(part, owned_ids, spec.num_experts) for part in (gate, up, down))
            local_index[list(owned_ids)] = torch.tensor(owned_ids, dtype=torch.int32)
        return cls(
            router=Linear.narrow(reader.linear(layer_name(layer, "mlp.gate.weight"))),
            gate=ops.Stored.of(gate),
            up=ops.Stored.of(up),
            down=ops.Stored.of(down),
            local_index=local_index,
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
        # Only owned slots are ever written, and the exchange reads no others.
        slot_rows = torch.empty((*ids.shape, x.shape[1]))
        if len(self.gate.bits):
            ops.experts(x, ids, weights, self.gate, self.up, self.down, self.local_index, slot_rows)
        return self.exchange.sum(slot_rows, ids, weights)

    def _count_ties(self, hazards: HazardCounts, logits: torch.Tensor, ids: torch.Tensor) -> None:
        _, probabilities = ops.router(logits, logits.shape[1], renormalise=False)
        owners = np.array(self.exchange.placement.owners, dtype=np.int32)
        hazards.count_ties(probabilities.numpy(), ids.numpy(), owners)


def _read_expert(reader: WeightReader, spec: ModelSpec, layer: int, expert: int) -> list[torch.Tensor]:
    """Packed gate, up and down of one expert, from either published layout."""
    gate_up_name, down_name = fused_experts(layer)
    if gate_up_name in reader.checkpoint.entries:
        row = (expert, expert + 1)
        gate_up = reader.linear(gate_up_name, rows=row)[0]
        weights = [gate_up[: spec.expert_width], gate_up[spec.expert_width :], reader.linear(down_name, rows=row)[0]]
    else:
        prefix = layer_name(layer, f"mlp.experts.{expert}.")
        weights = [reader.linear(f"{prefix}{part}_proj.weight") for part in ("gate", "up", "down")]
    return [ops.pack_weight(weight) for weight in weights]


def _stack(packed: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(packed) if packed else torch.empty((0, 0, 0, 0))
