"""A transport that is late at random: no result may depend on when a rank arrives."""

from __future__ import annotations

import random
import time

import torch

from .transport import Transport

_LATE_ONE_IN = 8
_LATEST_S = 0.002


class DelayedTransport(Transport):
    """Another transport, before every eighth call of which, at random, this rank sleeps for up to 2 ms.

    `stats`, shared with the transport inside, counts the sleeps too.
    """

    def __init__(self, transport: Transport, seed: int) -> None:
        self._transport = transport
        self._random = random.Random(f"{seed} of rank {transport.rank}")
        self.rank = transport.rank
        self.num_ranks = transport.num_ranks
        self.stats = transport.stats

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        self._be_late()
        return self._transport.all_gather(part)

    def broadcast(self, payload: torch.Tensor, root: int) -> torch.Tensor:
        self._be_late()
        return self._transport.broadcast(payload, root)

    def barrier(self) -> None:
        self._be_late()
        self._transport.barrier()

    def close(self) -> None:
        self._transport.close()

    def _be_late(self) -> None:
        if self._random.randrange(_LATE_ONE_IN) == 0:
            self.stats.num_delays += 1
            time.sleep(self._random.uniform(0, _LATEST_S))
