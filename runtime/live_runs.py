"""The runs of this user on this machine, found by the titles of their processes."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..ranks.machine import stat_fields

TITLE = re.compile(r"leafsum: (?:coordinator|rank (?P<rank>\d+)/(?P<tp>\d+)) (?P<run_id>[0-9a-f]+)")
"""What a coordinator and a rank call themselves in ps."""

STRIKING = {"T": "stopped", "t": "stopped by a debugger"}
"""State letters of proc(5) that no process has of its own doing."""

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class LiveProcess:
    """One process now. `age_s` since it started, `cpu_s` of all its threads, `memory_bytes` resident: pages that ranks
    share, as those of a mapped table, count for each.
    """

    role: str
    pid: int
    state: str
    age_s: float
    cpu_s: float
    memory_bytes: int

    def line(self) -> str:
        striking = f" {STRIKING[self.state]}" if self.state in STRIKING else ""
        return (
            f"{self.role} pid {self.pid} {self.state}{striking} {self.cpu_s:.1f} s {self.memory_bytes / 2**20:.0f} MiB"
        )


@dataclass(frozen=True, slots=True)
class LiveRun:
    """`program_pid`: the coordinator's parent, 0 where there is no coordinator. `tp`: as the ranks say, 0 where there
    is none.
    """

    run_id: str
    program_pid: int
    coordinator: LiveProcess | None
    ranks: tuple[LiveProcess, ...]
    tp: int

    @property
    def age_s(self) -> float:
        return max(process.age_s for process in self.processes)

    @property
    def processes(self) -> tuple[LiveProcess, ...]:
        return (*((self.coordinator,) if self.coordinator else ()), *self.ranks)

    @property
    def missing(self) -> tuple[str, ...]:
        """Roles that are dead, or have not begun: a dead process has no title, even where nobody has waited for it."""
        roles = ["coordinator", *(f"rank {rank}" for rank in range(self.tp))]
        present = {process.role for process in self.processes}
        return tuple(role for role in roles if role not in present) + (() if self.tp else ("every rank",))

    @property
    def is_striking(self) -> bool:
        """Whether a person should look: a process is missing or stopped."""
        return bool(self.missing) or any(process.state in STRIKING for process in self.processes)

    def line(self) -> str:
        """For a person: who, how old, and of each process state, CPU time and resident memory."""
        told = [f"{self.run_id} tp {self.tp}, {self.age_s:.0f} s old"]
        told += [f"program pid {self.program_pid}"] if self.program_pid else []
        told += [process.line() for process in self.processes]
        told += [f"{role} missing" for role in self.missing]
        return "; ".join(told)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"age_s": self.age_s, "missing": list(self.missing)}


def live_runs(proc: Path = Path("/proc")) -> list[LiveRun]:
    """All runs, oldest first. Processes that end meanwhile are left out."""
    found: dict[str, list[tuple[re.Match[str], LiveProcess, int]]] = {}
    for title, process, parent_pid in _titled_processes(proc):
        found.setdefault(title["run_id"], []).append((title, process, parent_pid))
    runs = [_run_of(run_id, members) for run_id, members in found.items()]
    return sorted(runs, key=lambda run: -run.age_s)


def _run_of(run_id: str, members: list[tuple[re.Match[str], LiveProcess, int]]) -> LiveRun:
    coordinators = [(process, parent_pid) for title, process, parent_pid in members if title["rank"] is None]
    ranks = sorted(
        ((int(title["rank"]), process) for title, process, _ in members if title["rank"]), key=lambda r: r[0]
    )
    return LiveRun(
        run_id=run_id,
        program_pid=coordinators[0][1] if coordinators else 0,
        coordinator=coordinators[0][0] if coordinators else None,
        ranks=tuple(process for _, process in ranks),
        tp=max((int(title["tp"]) for title, _, _ in members if title["tp"]), default=0),
    )


def _titled_processes(proc: Path) -> Iterator[tuple[re.Match[str], LiveProcess, int]]:
    """Of this user: title, process, and its parent's pid."""
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            title = TITLE.fullmatch((folder / "cmdline").read_bytes().rstrip(b"\0").decode(errors="replace"))
            if title is None:
                continue
            yield title, *_process(folder, title, now_s)
        except (FileNotFoundError, ProcessLookupError):
            continue


def _process(folder: Path, title: re.Match[str], now_s: float) -> tuple[LiveProcess, int]:
    """The process, and its parent's pid."""
    fields = stat_fields(folder / "stat")
    state, parent_pid = fields[0], int(fields[1])
    user_ticks, system_ticks, start_ticks, num_pages = (int(fields[index]) for index in (11, 12, 19, 21))
    process = LiveProcess(
        role=f"rank {title['rank']}" if title["rank"] else "coordinator",
        pid=int(folder.name),
        state=state,
        age_s=round(max(0.0, now_s - start_ticks * TICK_S), 2),
        cpu_s=round((user_ticks + system_ticks) * TICK_S, 2),
        memory_bytes=num_pages * os.sysconf("SC_PAGE_SIZE"),
    )
    return process, parent_pid
