"""Launch helpers: several ranks as threads of one process or as fresh processes, for tests, also those of embedders."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..errors import DeadlineExceeded, LeafsumError
from .kinds import TRANSPORTS
from .transport import Transport, TransportStats

Result = TypeVar("Result")

_START_S = 90.0  # for fresh interpreters to import torch and meet; seconds where the machine is idle


class _Meeting:
    """Where the threads of a gang meet: a call waits until all have read the last, puts in its part, waits, reads."""

    def __init__(self, num_ranks: int, timeout_s: float) -> None:
        self.parts: list[tuple[str, torch.Tensor]] = [("", torch.empty(0))] * num_ranks
        self.barrier = threading.Barrier(num_ranks)
        self.timeout_s = timeout_s
        self.failure = ""


class ThreadTransport(Transport):
    """A transport between threads, in memory. It also checks that all ranks make the same call on the same shape."""

    def __init__(self, rank: int, num_ranks: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.stats = TransportStats()
        self._meeting = meeting

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        gathered = torch.stack(self._meet(f"all_gather of {part.dtype} {list(part.shape)}", part))
        if part.nbytes:
            self.stats.count_all_gather(part, self.num_ranks)
        return gathered

    def broadcast(self, payload: torch.Tensor, root: int) -> torch.Tensor:
        received = self._meet(f"broadcast of {payload.dtype} {list(payload.shape)} from rank {root}", payload)[root]
        if payload.nbytes:
            self.stats.count_broadcast(payload, self.num_ranks, is_root=self.rank == root)
        return received

    def barrier(self) -> None:
        self._meet("barrier", torch.empty(0))
        self.stats.barrier.calls += 1

    def close(self) -> None:
        """Ends the gang: a rank that still waits for this one gets an error."""
        self._meeting.failure = self._meeting.failure or f"rank {self.rank} has closed its transport"
        self._meeting.barrier.abort()

    def _meet(self, operation: str, part: torch.Tensor) -> list[torch.Tensor]:
        meeting = self._meeting
        with self.stats.waiting():
            self._wait(operation)
            meeting.parts[self.rank] = (operation, part.clone())
            self._wait(operation)
        others = [(rank, other) for rank, (other, _) in enumerate(meeting.parts) if other != operation]
        if others:
            rank, other = others[0]
            raise LeafsumError(
                f"expected one call on all ranks, found {operation} on rank {self.rank}, {other} on rank {rank}"
            )
        return [part for _, part in meeting.parts]

    def _wait(self, operation: str) -> None:
        where = f"{operation} on rank {self.rank} of {self.num_ranks}"
        try:
            self._meeting.barrier.wait(self._meeting.timeout_s)
        except threading.BrokenBarrierError:
            if self._meeting.failure:
                raise LeafsumError(f"{where} was given up: {self._meeting.failure}") from None
            timeout_s = self._meeting.timeout_s
            text = f"expected {where} to end within {timeout_s:g} s, but not every rank took part"
            raise DeadlineExceeded(text, what=where, timeout_s=timeout_s) from None


def run_ranks(num_ranks: int, function: Callable[[Transport], Result], timeout_s: float = 60.0) -> list[Result]:
    """Calls function(transport) once for every rank, each in a thread of its own; the results in rank order.

    The first rank's error is raised, with its rank as a note; ranks that wait for it are released. `timeout_s` bounds
    every wait for other ranks.
    """
    meeting = _Meeting(num_ranks, timeout_s)
    errors: list[BaseException] = []

    def run(rank: int) -> Result:
        try:
            return function(ThreadTransport(rank, num_ranks, meeting))
        except BaseException as error:
            error.add_note(f"on rank {rank} of {num_ranks}")
            errors.append(error)  # the first one in is the cause, those after it were released by the abort below
            meeting.failure = meeting.failure or f"rank {rank} failed with {error!r}"
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as threads:
        futures = [threads.submit(run, rank) for rank in range(num_ranks)]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]


@dataclass(frozen=True, slots=True)
class RankExit:
    """How a rank process ended: exit status (negative: signal), what its function returned, what it wrote to stderr."""

    exit_status: int
    result: Any
    stderr: str


def run_processes(
    num_ranks: int,
    script: Path,
    function: str,
    folder: Path,
    timeout_s: float,
    kind: str = "shared",
    /,
    **arguments: Any,
) -> list[RankExit]:
    """Calls `function`(transport, **arguments) of `script` once for every rank, each in a fresh interpreter.

    `kind` of transport: "shared" memory or "gloo". Arguments and results are JSON. `folder`, empty, holds the
    rendezvous. `timeout_s` is the deadline of each call of the transport; processes still there that long after a start
    of at most 90 s are killed. Errors of a rank are in its stderr; the caller checks exit_status.
    """
    code = f"from {__name__} import _run_rank; _run_rank()"
    fixed = [str(script), function, kind, str(folder / "rendezvous"), str(num_ranks), str(timeout_s)]

    def run(rank: int) -> RankExit:
        command = [sys.executable, "-c", code, *fixed, str(rank), json.dumps(arguments)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                stdout, stderr = process.communicate(timeout=_START_S + timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                stdout, stderr = process.communicate()
            result = json.loads(stdout.splitlines()[-1]) if process.returncode == 0 else None
            return RankExit(process.returncode, result, stderr)

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(run, range(num_ranks)))


def _run_rank() -> None:
    """The child's side of run_processes."""
    script, function, kind, store, num_ranks, timeout_s, rank, arguments = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("rank_script", script)
    if spec is None or spec.loader is None:
        raise ValueError(f"expected a Python file, found {script}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    transport = TRANSPORTS[kind](int(rank), int(num_ranks), store, float(timeout_s), meeting_timeout_s=_START_S)
    result = getattr(module, function)(transport, **json.loads(arguments))
    transport.close()
    sys.stdout.write("\n" + json.dumps(result))  # the last line, after whatever the function has printed
