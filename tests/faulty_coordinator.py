"""A coordinator that meets with faults on order, as its ranks do: `FAULTS=FOLDER python -m faulty_coordinator`.

Its phases: spawn (before it listens; faults of its socket: just after), load (while its first ranks load), ready (just
before it says Started), prompt and decode (a step of such rows is under way), idle (at SIGUSR1), shutdown, and recovery
(while the ranks of a new gang load).
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from faulty import Victim, fill_disk, option, phase_of
from leafsum.ranks.messages import Plan, Ready
from leafsum.runtime import coordinator, launcher
from leafsum.runtime.child import Child
from leafsum.runtime.coordinator import Coordinator
from leafsum.runtime.gang import Gang
from leafsum.runtime.messages import FromCoordinator, Start, Started

RUN_FOLDER = Path(option("--run-folder"))

victim = Victim("coordinator")
victim.control_name = "host.sock"


class FaultyCoordinator(Coordinator):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        victim.control = self.host
        signal.signal(signal.SIGUSR1, lambda *_: victim.meet("idle", at_socket=True, anywhere=True))

    def _first_word(self) -> Start:
        victim.meet("spawn", at_socket=True, anywhere=False)
        return super()._first_word()

    def _tell_pool(self, message: FromCoordinator) -> None:
        if isinstance(message, Started):
            victim.meet("ready", at_socket=True, anywhere=True)
        super()._tell_pool(message)


class FaultyGang(Gang):
    def __init__(self, *arguments: Any, number: int, **fields: Any) -> None:
        if victim.take("recovery" if number else "load", {"disk full"}):
            fill_disk(RUN_FOLDER)
        super().__init__(*arguments, number=number, **fields)

    def collect(self, kind: type[Any], *arguments: Any) -> list[Any]:
        if kind is Ready:
            victim.meet("recovery" if self.number else "load", at_socket=True, anywhere=True)
        return super().collect(kind, *arguments)

    def send_plan(self, plan: Plan) -> None:
        if victim.take(phase_of(plan), {"corrupt plan"}):
            self._send_to([*self._identities][-1], b"\xc1 is no message")
        super().send_plan(plan)
        victim.meet(phase_of(plan), at_socket=True, anywhere=True)

    def end(self) -> None:
        victim.meet("shutdown", at_socket=True, anywhere=True)
        super().end()


def faulty_rank(role: str, _module: str, *arguments: Any) -> Child:
    return Child(role, "faulty_worker", *arguments)


if __name__ == "__main__":
    victim.meet("spawn", at_socket=False, anywhere=True)
    if victim.take("spawn", {"disk full"}):
        fill_disk(RUN_FOLDER)
    coordinator.ENDING_S = 2.0  # how much longer a pool waits while a gang is started
    launcher.Child = faulty_rank  # type: ignore[assignment, misc]
    coordinator.Coordinator = FaultyCoordinator  # type: ignore[assignment, misc]
    coordinator.Gang = FaultyGang  # type: ignore[misc]
    coordinator.main()
