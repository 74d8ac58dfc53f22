"""A program with a pool, for the suite `waiting`: `python -m leafsum.runtime.bench.waiter SETTINGS WAIT_S`.

It is a process of its own, so that all CPU time it uses while it waits is its pool's: the command that asks it may draw
on a terminal. Settings are JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping

from ...errors import LeafsumError
from ...ranks.json_lines import serve_lines
from ..pool import WorkerPool
from ..sampling import SamplingParams
from ..settings import Settings
from .cpu import cpu_ns

SETTLE_S = 0.5
"""What was under way when a wait begins has come by then."""

PROMPT = [1, 2, 3, 4]
MOST_TOKENS = 1000
"""Of a request that is held up after its first token and then cancelled: far more than can come meanwhile."""


class Waiter:
    """Answers with milliseconds of CPU time a second of waiting, by process: "program", "coordinator", "rank 0", ..."""

    def __init__(self, pool: WorkerPool, wait_s: float) -> None:
        self.pool = pool
        self.wait_s = wait_s
        pool.generate([PROMPT], SamplingParams(max_tokens=4, ignore_eos=True))
        ranks = {f"rank {rank.rank}": rank.pid for rank in pool.witness().ranks}
        self.pids = {"program": os.getpid(), "coordinator": pool.coordinator_pid} | ranks

    def answer(self, late_rank: int | None) -> dict[str, float]:
        """Of a pool without requests, or of one whose `late_rank` holds up a decode step."""
        if late_rank is None:
            return self._waiting(self.pids)
        others = {name: pid for name, pid in self.pids.items() if name != f"rank {late_rank}"}
        late_pid = self.pids[f"rank {late_rank}"]
        with self.pool.stream(PROMPT, SamplingParams(max_tokens=MOST_TOKENS, ignore_eos=True)) as stream:
            next(iter(stream))
            os.kill(late_pid, signal.SIGSTOP)
            try:
                found = self._waiting(others)
                stream.cancel()
            finally:
                with contextlib.suppress(ProcessLookupError):  # its gang has ended, and the stream says why
                    os.kill(late_pid, signal.SIGCONT)
            (completion,) = stream.result()
        if completion.finish_reason != "cancelled":
            text = f"expected a request of {MOST_TOKENS} tokens to be held up, found that it has ended"
            raise LeafsumError(f"{text} ({completion.finish_reason}): nobody waited")
        return found

    def _waiting(self, pids: Mapping[str, int]) -> dict[str, float]:
        time.sleep(SETTLE_S)
        begin_ns, before_ns = time.monotonic_ns(), {name: cpu_ns(pid) for name, pid in pids.items()}
        time.sleep(self.wait_s)
        after_ns = {name: cpu_ns(pid) for name, pid in pids.items()}
        wall_ns = time.monotonic_ns() - begin_ns
        return {name: 1000 * (after_ns[name] - before_ns[name]) / wall_ns for name in pids}


def main() -> None:
    settings, wait_s = sys.argv[1:]
    with WorkerPool(Settings.from_dict(json.loads(settings))) as pool:
        waiter = Waiter(pool, float(wait_s))
        serve_lines(lambda: lambda question: waiter.answer(**question))


if __name__ == "__main__":
    main()
