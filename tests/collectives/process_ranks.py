"""What the rank processes of the tests of transports run: functions of a connected transport, results as JSON.

A fresh interpreter costs 2.7 s of CPU, nearly all of it torch, so one gang of three goes through most parts in turn.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import torch
from leafsum.collectives.process_transport import ProcessTransport
from leafsum.errors import DeadlineExceeded, LeafsumError


def live_through_all(transport: ProcessTransport, folder: str, with_fork: bool) -> dict[str, Any]:
    """Every part in turn on one transport. Rank 1 dies in the last one: what each rank saw before is in its file."""
    seen: dict[str, Any] = {"move_bytes": move_bytes(transport)}  # first: it counts
    if with_fork:
        seen["fork_a_copy"] = fork_a_copy(transport)
    seen["arrive_late"] = arrive_late(transport, late_s=2.0)
    seen["wait_for_a_hanging_peer"] = wait_for_a_hanging_peer(transport, folder, timeout_s=0.5)
    Path(folder, f"{transport.rank}.json").write_text(json.dumps(seen))
    transport.barrier()  # all files are written
    return lose_a_peer(transport)


def move_bytes(transport: ProcessTransport) -> dict[str, Any]:
    """Every collective once, on bit patterns that arithmetic would change."""
    counts = [2, 0, 1][: transport.num_ranks]
    bits = (
        torch.tensor([0x7F800001, -0x80000000, 1, -1], dtype=torch.int32) + transport.rank
    )  # a signalling NaN, -0.0, ...
    part = bits.view(torch.float32).repeat(counts[transport.rank], 1)
    unequal = transport.all_gather_unequal(part, counts)
    dtypes = (torch.bfloat16, torch.uint16, torch.bool, torch.int64)
    results = {
        "equal": transport.all_gather(bits.view(torch.float32)).view(torch.int32).tolist(),
        "unequal": [gathered.contiguous().view(torch.int32).tolist() for gathered in unequal],
        "dtypes": [transport.all_gather(torch.ones(3, dtype=dtype)).tolist() for dtype in dtypes],
        "empty": list(transport.all_gather(torch.zeros(0, 5)).shape),
        "broadcast": transport.broadcast(torch.tensor([transport.rank, 5]), root=1).tolist(),
        "group_is_private": not torch.distributed.is_initialized(),
        "listening": _listening_addresses(),
    }
    transport.barrier()
    return results | {"stats": transport.stats.as_dict()}


def arrive_late(transport: ProcessTransport, late_s: float) -> dict[str, float]:
    """Rank 1 is late; CPU and wall time of the wait. Then a hundred calls, which miss no wake-up."""
    transport.barrier()
    before, start_s = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    if transport.rank == 1:
        time.sleep(late_s)
    transport.all_gather(torch.zeros(2560))
    after, end_s = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    for _ in range(100):
        transport.barrier()
    return {"cpu_s": cpu_s, "wall_s": end_s - start_s, "calls_s": time.monotonic() - end_s}


def lose_a_peer(transport: ProcessTransport) -> dict[str, Any]:
    """Rank 1 dies; what the others learn, how fast, and what they are told afterwards."""
    pids = transport.all_gather(torch.tensor(os.getpid())).tolist()
    if transport.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start_s = time.monotonic()
    errors = [_error_of(transport, "all_gather"), _error_of(transport, "barrier")]
    return {"errors": errors, "seconds": time.monotonic() - start_s, "pids": pids}


def wait_for_a_hanging_peer(transport: ProcessTransport, folder: str, timeout_s: float) -> dict[str, Any]:
    """Rank 1 stays out of every kind of call with rank 0; each has a mesh of its own, since a failure tears it."""
    names = ("all_gather", "broadcast", "barrier") if transport.rank in (0, 1) else ()
    meshes = {name: type(transport)(transport.rank, 2, f"{folder}/{name}", timeout_s, 60.0) for name in names}
    start_s = time.monotonic()
    errors = [_error_of(mesh, name) for name, mesh in meshes.items() if transport.rank == 0]
    seconds = time.monotonic() - start_s
    transport.barrier()  # the others are here while rank 0 waits in vain
    return {"errors": errors, "seconds": seconds}


def be_killed(transport: ProcessTransport) -> None:
    """Rank 0 in a call, rank 1 between two."""
    pids = transport.all_gather(torch.tensor(os.getpid())).tolist()
    if transport.rank == 1:
        time.sleep(0.3)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    transport.barrier()


def fork_a_copy(transport: ProcessTransport) -> int:
    """The exit status of a forked copy: 0 if it was refused. Its close() and its end must not disturb the ranks."""
    pid = os.fork()
    if pid == 0:
        error = _error_of(transport, "barrier")
        transport.close()
        os._exit(0 if "forked copy of rank" in error[1] else 1)
    exit_status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    transport.barrier()
    return exit_status


def _error_of(transport: ProcessTransport, operation: str) -> tuple[str, str]:
    calls = {
        "all_gather": lambda: transport.all_gather(torch.zeros(4)),
        "broadcast": lambda: transport.broadcast(torch.zeros(4), root=1),
        "barrier": transport.barrier,
    }
    try:
        calls[operation]()
    except DeadlineExceeded as error:
        return "DeadlineExceeded", str(error)
    except LeafsumError as error:
        return "LeafsumError", str(error)
    return "", ""


def _listening_addresses() -> list[str]:
    """Local addresses of this process's listening TCP sockets, as the kernel writes them (hex, 4 or 16 bytes)."""
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
    inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    addresses = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with open(table) as lines:
            fields = [line.split() for line in list(lines)[1:]]
        addresses += [field[1].split(":")[0] for field in fields if field[3] == "0A" and field[9] in inodes]
    return addresses


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")
