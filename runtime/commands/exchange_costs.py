"""What a token's rows cost to exchange, by exchange mode: counted from the placements, nothing is sent."""

from __future__ import annotations

from dataclasses import dataclass

from ...collectives.placement import Placement
from ...collectives.tree import CanonicalTree
from ...ranks.footprint import FP32_BYTES
from ...ranks.spec import ATTENTION, DELTANET, ModelSpec

MODES = ("slots", "nodes", "auto")


@dataclass(frozen=True, slots=True)
class ExchangeCost:
    """One mode, by what is exchanged (experts, attention, deltanet).

    `modes`: slots or nodes, which differ in auto alone. `rows`: padded FP32 rows a rank sends to each peer for a token
    in a layer. `bytes_sent`: those of a token over all layers and peers.
    """

    modes: dict[str, str]
    rows: dict[str, int]
    bytes_sent: dict[str, int]

    @property
    def bytes_sent_per_token(self) -> int:
        return sum(self.bytes_sent.values())


def expert_placement(spec: ModelSpec, name: str, num_ranks: int) -> Placement:
    tree = CanonicalTree(spec.num_experts, has_shared=spec.shared_width > 0)
    return Placement.named(name, tree, num_ranks)


def exchange_costs(spec: ModelSpec, experts: Placement) -> dict[str, ExchangeCost]:
    """By mode: slots, nodes, auto."""
    placed: dict[str, tuple[Placement, int, int]] = {}
    if spec.expert_layers:
        placed["experts"] = (experts, spec.top_k, len(spec.expert_layers))
    for name, kind, num_leaves in _row_split(spec):
        leaves = Placement.contiguous(CanonicalTree(num_leaves, ids_per_leaf=1), experts.num_ranks)
        placed[name] = (leaves, num_leaves, len(spec.layers_of(kind)))
    return {mode: _cost(spec, mode, placed) for mode in MODES}


def _row_split(spec: ModelSpec) -> list[tuple[str, str, int]]:
    """Name, kind of layer and leaves of each row-split projection; every leaf is one id and is always chosen."""
    projections = [("attention", ATTENTION, spec.num_attention_leaves)]
    if spec.deltanet is not None:
        projections.append(("deltanet", DELTANET, spec.deltanet.num_leaves))
    return [projection for projection in projections if spec.layers_of(projection[1])]


def _cost(spec: ModelSpec, mode: str, placed: dict[str, tuple[Placement, int, int]]) -> ExchangeCost:
    modes, rows, bytes_sent = {}, {}, {}
    for name, (placement, top_k, num_layers) in placed.items():
        modes[name] = placement.auto_mode(top_k) if mode == "auto" else mode
        rows[name] = placement.rows_per_token(top_k)[modes[name]]
        bytes_sent[name] = rows[name] * num_layers * spec.hidden_size * FP32_BYTES * (placement.num_ranks - 1)
    return ExchangeCost(modes, rows, bytes_sent)
