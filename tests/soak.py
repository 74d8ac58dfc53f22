"""A long run under fire: `python tests/soak.py --minutes 10`. Exit code 0 when every byte was right and memory is flat.

Streams come and go, some are cancelled, and ranks are killed or stopped at random moments all the time. What every
stream was told is compared with what the same request comes to on one rank, undisturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from leafsum.runtime.pool import WorkerPool
from leafsum.runtime.sampling import Completion, SamplingParams
from processes import rank_pids

NUM_PROMPTS = 24
LENGTHS = (1, 8, 40, 120)
NUM_CLIENTS = 8
GROWTH_BYTES = 8 << 20
"""What the program and the coordinator may grow by after the first tenth of the time: allocators keep some of what they
were asked for at the busiest moment; one leaked kilobyte a request would be more than this."""

DEEDS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)

WAITS_S = {"kill": (0.0, 12.0), "report": 30.0}


def prompt(index: int) -> list[int]:
    return [(11 * index + 5 * position) % 250 for position in range(1 + 7 * index)]


def params(length: int) -> SamplingParams:
    return SamplingParams(max_tokens=length, ignore_eos=True)


def settings(tp: int) -> dict[str, object]:
    return {
        "model": "tiny",
        "tp": tp,
        "threads": 1,
        "kv_tokens": 8192,
        "concurrency": NUM_CLIENTS,
        "prefill_chunk": 48,
        "start_timeout_s": 60.0,
        "step_timeout_s": 6.0,
        "recover_limit": 1_000_000,
        "log_level": "error",
    }


@dataclass
class Soak:
    """What all threads share. `faults` are differences and errors: one is enough to fail."""

    pool: WorkerPool
    expected: dict[tuple[int, int], Completion]
    end_s: float
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.end_s and not self.faults

    def client(self, seed: int) -> None:
        chance = random.Random(seed)
        while self.goes_on:
            try:
                self.one_stream(chance)
            except Exception as error:
                self.faults.append(f"{type(error).__name__}: {error}")

    def one_stream(self, chance: random.Random) -> None:
        index, length = chance.randrange(NUM_PROMPTS), chance.choice(LENGTHS)
        cancel_at = chance.randrange(length + 1) if chance.random() < 0.25 else length + 1
        told: list[int] = []
        with self.pool.stream(prompt(index), params(length)) as stream:
            for delta in stream:
                told += delta.token_ids
                if len(told) >= cancel_at and delta.completion is None:
                    cancel_at = length + 1
                    stream.cancel()
        (done,) = stream.result()
        expected = self.expected[index, length]
        self.counts[done.finish_reason] += 1
        self.counts["tokens"] += len(told)
        self.counts["lived through a recovery"] += bool(done.recoveries)
        is_whole = done.finish_reason == "length"
        if tuple(told) != expected.token_ids[: len(told)] or tuple(told) != done.token_ids:
            self.faults.append(f"prompt {index}, {length} tokens: told {told}, expected {expected.token_ids}")
        elif is_whole and (done.residual_hash, done.text) != (expected.residual_hash, expected.text):
            self.faults.append(f"prompt {index}, {length} tokens: residual {done.residual_hash}, or its text")
        elif not is_whole and done.finish_reason != "cancelled":
            self.faults.append(f"prompt {index}, {length} tokens: {done.finish_reason}: {done.error}")

    def killer(self, seed: int) -> None:
        chance = random.Random(seed)
        while self.goes_on:
            time.sleep(chance.uniform(*WAITS_S["kill"]))
            pids = sorted(rank_pids(self.pool.run_id))
            if pids and self.goes_on:
                deed = chance.choices(DEEDS, weights=(6, 2, 2))[0]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chance.choice(pids), deed)
                    self.counts[deed.name] += 1


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def watch(soak: Soak, begin_s: float) -> list[dict[str, int]]:
    """A line every half minute, until the end."""
    rows = []
    while soak.goes_on:
        time.sleep(min(WAITS_S["report"], max(0.1, soak.end_s - time.monotonic())))
        gc.collect()
        row = {"second": round(time.monotonic() - begin_s), "recoveries": len(soak.pool.recoveries)}
        for name, pid in (("program", os.getpid()), ("coordinator", soak.pool.coordinator_pid)):
            row |= {f"{name}_kib": resident_bytes(pid) >> 10, f"{name}_fds": num_fds(pid)}
        rows.append(row)
        say({**row, **soak.counts})
    return rows


def say(facts: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def undisturbed() -> dict[tuple[int, int], Completion]:
    wanted = [(index, length) for index in range(NUM_PROMPTS) for length in LENGTHS]
    with WorkerPool(**{**settings(1), "recover": "never"}) as pool:  # type: ignore[arg-type]
        done = pool.generate([prompt(index) for index, _ in wanted], [params(length) for _, length in wanted])
    return dict(zip(wanted, done, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--tp", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    expected = undisturbed()
    with WorkerPool(**settings(args.tp)) as pool:  # type: ignore[arg-type]
        begin_s = time.monotonic()
        soak = Soak(pool, expected, begin_s + 60 * args.minutes)
        threads = [threading.Thread(target=soak.client, args=(args.seed * 1000 + n,)) for n in range(NUM_CLIENTS)]
        threads.append(threading.Thread(target=soak.killer, args=(args.seed,)))
        for thread in threads:
            thread.start()
        rows = watch(soak, begin_s)
        for thread in threads:
            thread.join(300)
        num_recoveries = max((each.number for each in pool.recoveries), default=0)
    settled, last = rows[len(rows) // 10], rows[-1]
    growth = {key: last[key] - settled[key] for key in settled if key not in ("second", "recoveries")}
    is_flat = all(growth[f"{name}_kib"] <= GROWTH_BYTES >> 10 for name in ("program", "coordinator"))
    verdict = {
        "ok": not soak.faults and is_flat,
        "gangs_lost": num_recoveries,
        "growth": growth,
        "faults": soak.faults[:5],
        **soak.counts,
    }
    say(verdict)
    return 0 if verdict["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
