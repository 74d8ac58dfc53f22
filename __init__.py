"""leafsum: mixture-of-experts language models on several processes, the same bytes at any number of ranks.

    from leafsum import SamplingParams, WorkerPool

    with WorkerPool(model="tiny", tp=2) as pool:
        (completion,) = pool.generate(["Once upon a time"], SamplingParams(max_tokens=16))

The pool's names are looked up when first used, so that a part (leafsum.collectives) can be imported without the rest.
"""

from typing import TYPE_CHECKING

from .errors import (
    ConfigError,
    DeadlineExceeded,
    GangError,
    LeafsumError,
    ModelError,
    OutputError,
    PoolClosed,
    PromptError,
    ProtocolError,
    QueueFull,
    RankError,
    RankLost,
    RankMismatch,
    ReceiptMismatch,
    RequestFailed,
    TransportError,
)

__all__ = [
    "Completion",
    "ConfigError",
    "DeadlineExceeded",
    "Delta",
    "GangError",
    "LeafsumError",
    "ModelError",
    "OutputError",
    "PoolClosed",
    "PromptError",
    "ProtocolError",
    "QueueFull",
    "RankError",
    "RankLost",
    "RankMismatch",
    "ReceiptMismatch",
    "Recovery",
    "RequestFailed",
    "SamplingParams",
    "Settings",
    "Stream",
    "TransportError",
    "WorkerPool",
]

if TYPE_CHECKING:
    from .runtime.pool import WorkerPool
    from .runtime.recoveries import Recovery
    from .runtime.sampling import Completion, SamplingParams
    from .runtime.settings import Settings
    from .runtime.stream import Delta, Stream
else:
    _HOME_OF = {
        "Completion": ".runtime.sampling",
        "Delta": ".runtime.stream",
        "Recovery": ".runtime.recoveries",
        "SamplingParams": ".runtime.sampling",
        "Settings": ".runtime.settings",
        "Stream": ".runtime.stream",
        "WorkerPool": ".runtime.pool",
    }

    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        globals()[name] = value = getattr(import_module(_HOME_OF[name], __name__), name)
        return value

    def __dir__() -> list[str]:
        return __all__
