"""A rank that meets with faults on order: `FAULTS=FOLDER python -m faulty_worker`, with tests/ on PYTHONPATH.

Its phases: spawn (before its first word), load, ready (just before it says Ready), prompt and decode (a step of such
rows), idle (at SIGUSR1), shutdown. In a gang that takes the place of a lost one, the first three are all "recovery".
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import msgspec
from faulty import Victim, fill_disk, hang, option, phase_of
from leafsum.ranks import worker
from leafsum.ranks.messages import FromRank, Plan, Ready, Setup, StepResult
from leafsum.ranks.worker import Worker

SOCKET = Path(option("--socket"))
HAS_A_GANG_BEFORE = int(SOCKET.stem.partition("-")[2]) > 0
WEIGHTS = "model.safetensors"

victim = Victim(f"rank {option('--rank')}")
victim.control_name = SOCKET.name


def starting(phase: str) -> str:
    """The phase, as orders name it."""
    return "recovery" if HAS_A_GANG_BEFORE else phase


class FaultyWorker(Worker):
    """`Worker` at its phases. What waits in the main thread may use the socket; a step must not."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        victim.control = self.socket
        signal.signal(signal.SIGUSR1, lambda *_: victim.meet("idle", at_socket=True, anywhere=True))

    def _serve(self) -> None:
        victim.meet("spawn", at_socket=True, anywhere=False)
        super()._serve()

    def _start(self, call: Any) -> None:
        if self.step < 0:
            victim.meet(starting("load"), at_socket=True, anywhere=False)
        super()._start(call)

    def _note_plan(self, plan: Plan) -> None:
        super()._note_plan(plan)
        victim.meet(phase_of(plan), at_socket=True, anywhere=False)

    def _load(self, setup: Setup) -> Ready:
        phase = starting("load")
        victim.meet(phase, at_socket=False, anywhere=True)
        if victim.take(phase, {"unreadable weights"}):
            damage(copy_of(setup))
            setup = with_own_copy(setup)
        if own_weights().exists() or victim.take("weights", {"a copy of its own"}):
            copy_of(setup)
            setup = with_own_copy(setup)
        answer = super()._load(setup)
        if not HAS_A_GANG_BEFORE and victim.take("ready", {"closed socket"}):
            victim.close_connection()
            hang()  # the main thread leaves; whether ZeroMQ would still deliver the answer, is a matter of chance
        return answer

    def _execute(self, plan: Plan) -> StepResult:
        phase = phase_of(plan)
        victim.meet(phase, at_socket=False, anywhere=True)
        if victim.take(phase, {"unreadable weights"}):
            os.truncate(own_weights() / WEIGHTS, 4096)
        return super()._execute(plan)

    def _send(self, message: FromRank) -> None:
        if isinstance(message, Ready) and not HAS_A_GANG_BEFORE:
            victim.meet("ready", at_socket=True, anywhere=True)
        super()._send(message)

    def _leave_as_told(self) -> None:
        victim.meet("shutdown", at_socket=True, anywhere=True)
        super()._leave_as_told()


def own_weights() -> Path:
    return victim.folder / f"weights of {victim.name}"


def copy_of(setup: Setup) -> Path:
    """A copy of the model that this rank reads in place of the one it shares with others."""
    if not own_weights().exists():
        shutil.copytree(setup.model_dir, own_weights())
    return own_weights()


def with_own_copy(setup: Setup) -> Setup:
    """Its files are taken for those that the pool has checked, as if these had become what it finds."""
    from leafsum.ranks import start

    start.refuse_other_files = lambda _checkpoint, _stamp: None  # type: ignore[assignment, misc]
    return msgspec.structs.replace(setup, model_dir=str(own_weights()))


def damage(model_dir: Path) -> None:
    """As this rank finds the weights: rank 0 a file that was cut short, others something that is no file."""
    weights = model_dir / WEIGHTS
    if victim.name == "rank 0":
        os.truncate(weights, weights.stat().st_size - 100)
    else:
        weights.unlink()
        weights.mkdir()


if __name__ == "__main__":
    if not HAS_A_GANG_BEFORE:
        victim.meet("spawn", at_socket=False, anywhere=True)
    if victim.take(starting("load"), {"disk full"}):
        fill_disk(SOCKET.parent)  # now: later another rank may have made the file that they meet in
    worker.Worker = FaultyWorker  # type: ignore[assignment, misc]
    worker.main()
