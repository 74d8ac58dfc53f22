"""The canonical tree, placements, exchanges and transports: one sum, the same bits on any number of ranks.

Usable alone by other engines (docs/collectives.md); imports nothing of ranks/ or runtime/. Launch helpers for tests are
in `leafsum.collectives.testing`. Names are looked up when first used: tree and placement are wanted without torch too.
"""

from typing import TYPE_CHECKING

from ..errors import DeadlineExceeded, LeafsumError, TransportError

__all__ = [
    "CanonicalTree",
    "DeadlineExceeded",
    "Exchange",
    "GlooTransport",
    "LeafsumError",
    "Placement",
    "SharedMemoryTransport",
    "SingleRank",
    "Transport",
    "TransportError",
    "TransportStats",
    "reference_sum",
]

if TYPE_CHECKING:
    from .exchange import Exchange
    from .gloo import GlooTransport
    from .placement import Placement
    from .reference import reference_sum
    from .shared_memory import SharedMemoryTransport
    from .transport import SingleRank, Transport, TransportStats
    from .tree import CanonicalTree
else:
    _HOME_OF = {
        "CanonicalTree": ".tree",
        "Exchange": ".exchange",
        "GlooTransport": ".gloo",
        "Placement": ".placement",
        "SharedMemoryTransport": ".shared_memory",
        "SingleRank": ".transport",
        "Transport": ".transport",
        "TransportStats": ".transport",
        "reference_sum": ".reference",
    }

    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        globals()[name] = value = getattr(import_module(_HOME_OF[name], __name__), name)
        return value

    def __dir__() -> list[str]:
        return __all__
