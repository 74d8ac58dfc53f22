"""The canonical tree, placements, exchanges and transports: one sum, the same bits on any number of ranks.

Usable alone by other engines (docs/collectives.md); imports nothing of ranks/ or runtime/. Launch helpers for tests are
in `leafsum.collectives.testing`.
"""

from ..errors import DeadlineExceeded, LeafsumError
from .exchange import Exchange
from .gloo import GlooTransport
from .placement import Placement, check_rank_count
from .reference import reference_sum
from .transport import SingleRank, Transport, TransportStats
from .tree import CanonicalTree

__all__ = [
    "CanonicalTree",
    "DeadlineExceeded",
    "Exchange",
    "GlooTransport",
    "LeafsumError",
    "Placement",
    "SingleRank",
    "Transport",
    "TransportStats",
    "check_rank_count",
    "reference_sum",
]
