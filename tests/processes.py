"""What a test needs to know of processes: who is left, and what CPU time each has used."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path


def processes_in(folder: Path) -> list[int]:
    """The processes whose working folder is `folder`: children inherit it, so a stray one is found by it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if os.readlink(entry / "cwd") == str(folder) and state_of(int(entry.name)) != "Z":
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def state_of(pid: int) -> str:
    """The state letter of a process ("Z": dead and not waited for), or "" where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def title_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()


def rank_pids(run_id: str) -> dict[int, int]:
    """The rank processes of a run that are alive, each with the number of ranks in its title."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and state_of(int(entry.name)) not in ("", "Z"):
            try:
                words = title_of(int(entry.name)).split()
            except OSError:
                continue
            if words[:2] == ["leafsum:", "rank"] and words[3:] == [run_id]:
                found[int(entry.name)] = int(words[2].partition("/")[2])
    return found


def kill(pid: int) -> None:
    """Kill a process, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def cpu_ns(pid: int) -> int:
    """CPU time that all threads of a process have used, in nanoseconds."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def wait_until(holds: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.02)


def all_gone(pids: Iterable[int]) -> bool:
    return all(state_of(pid) in ("", "Z") for pid in pids)
