"""A gang that times its own all-gathers: `python -m leafsum.ranks.latency TRANSPORT RANKS STORE`, for `leafsum bench`.

One process imports torch and forks the others before any thread is there. Rank 0 hears the questions and passes them on
over the transport itself; the others wait in a broadcast. All leave when nobody asks any more.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from typing import Any

import setproctitle
import torch

from ..collectives import Transport
from ..collectives.kinds import TRANSPORTS
from .control import die_with_parent
from .json_lines import serve_lines

TIMEOUT_S = 120.0
"""Of the meeting, of a call, and of the wait for the next question."""


def main() -> None:
    name, num_ranks, store_path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    rank = _fork_ranks(num_ranks)
    setproctitle.setproctitle(f"leafsum: bench {name} {rank}/{num_ranks}")
    transport = TRANSPORTS[name](rank, num_ranks, store_path, TIMEOUT_S)
    if rank == 0:
        serve_lines(lambda: lambda question: _ask_all(transport, **question))
        _ask_all(transport, num_bytes=0, num_calls=0)
    else:
        while _hear(transport):
            pass
    transport.close()


def _fork_ranks(num_ranks: int) -> int:
    """The rank that this process is from here on; the first one stays rank 0."""
    first_pid = os.getpid()
    for rank in range(1, num_ranks):
        if os.fork() == 0:
            die_with_parent(first_pid)
            return rank
    return 0


def _ask_all(transport: Transport, num_bytes: int, num_calls: int) -> dict[str, Any]:
    """The seconds that each of `num_calls` all-gathers took, as rank 0 saw them; no calls: the others leave."""
    transport.broadcast(torch.tensor([num_bytes, num_calls]), 0)
    return {"seconds": _time_calls(transport, num_bytes, num_calls)}


def _hear(transport: Transport) -> bool:
    num_bytes, num_calls = transport.broadcast(torch.tensor([0, 0]), 0).tolist()
    _time_calls(transport, num_bytes, num_calls)
    return bool(num_calls)


def _time_calls(transport: Transport, num_bytes: int, num_calls: int) -> list[float]:
    part = torch.zeros(num_bytes, dtype=torch.uint8)
    times_s = [time.perf_counter()]
    for _ in range(num_calls):
        transport.all_gather(part)
        times_s.append(time.perf_counter())
    return [end_s - begin_s for begin_s, end_s in itertools.pairwise(times_s)]


if __name__ == "__main__":
    main()
