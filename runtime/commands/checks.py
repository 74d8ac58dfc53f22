"""What this machine has of what leafsum needs. Every check answers by itself, whatever the others find."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

from ...errors import LeafsumError
from ...ranks.machine import cpu_name
from ..receipts.facts import memory_bytes
from ..settings import refuse_unknown_variables

OLDEST_KERNEL = (5, 4)
OLDEST_PYTHON = (3, 11)
LEAST_MEMORY_BYTES = 2 << 30
LEAST_SHM_BYTES = 64 << 20
LATE_GANG = 999
"""A run that was recovered so often still has room for its sockets' names."""

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `advice` says what to do, empty where nothing is to be done."""

    name: str
    status: Status
    found: str
    advice: str = ""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def examine(environ: Mapping[str, str] | None = None) -> list[Check]:
    """All checks, in the order of the report. Never raises: a check that breaks is a failed check."""
    checks: list[Callable[[], Check]] = [
        _python,
        _packages,
        _extension,
        _processor,
        _memory,
        _kernel,
        _pidfd,
        _shared_memory,
        _run_folder,
        lambda: _variables(os.environ if environ is None else environ),
        _gpus,
    ]
    return [_guarded(check) for check in checks]


def _guarded(check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:
        name = check.__name__.strip("_").replace("_", " ")
        return Check(name, "fail", f"{type(error).__name__}: {error}", "report this with the text above")


def _python() -> Check:
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info[:2] < OLDEST_PYTHON:
        return Check("python", "fail", found, f"install Python {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or newer")
    return Check("python", "ok", found)


def _packages() -> Check:
    """Versions from the installed metadata: importing torch would take longer than all other checks together."""
    found, missing = [], []
    for requirement in requires("leafsum") or []:
        if "extra ==" in requirement:
            continue
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return Check(
            "packages", "fail", f"missing: {', '.join(missing)}", "install leafsum again, with its dependencies"
        )
    return Check("packages", "ok", ", ".join(found))


def _extension() -> Check:
    try:
        from ... import _C
    except ImportError as error:
        return Check(
            "extension", "fail", f"leafsum._C: {error}", "build it: ./launch.sh setup, or install leafsum again"
        )
    if not _C.subnormals_kept():
        advice = "find the library built with fast-math that turns flush-to-zero on, and remove it"
        return Check("extension", "fail", "leafsum._C is here, but subnormal numbers are flushed to zero", advice)
    names = _C.instruction_sets()
    found = f"leafsum._C runs {', '.join(names)} here (all give the same bits); subnormal numbers are kept"
    if names == ["plain"] and platform.machine() == "x86_64":
        return Check("extension", "warn", found, "a processor with AVX2 is several times as fast")
    return Check("extension", "ok", found)


def _processor() -> Check:
    machine, num_cores = platform.machine(), len(os.sched_getaffinity(0))
    found = f"{cpu_name()} ({machine}), {num_cores} cores for this process"
    if machine not in ("x86_64", "aarch64"):
        return Check("processor", "fail", found, "leafsum runs on x86-64 and aarch64")
    return Check("processor", "ok", found)


def _memory() -> Check:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    found = f"{available / 2**30:.1f} GiB available of {memory_bytes() / 2**30:.1f} GiB"
    if available < LEAST_MEMORY_BYTES:
        return Check("memory", "warn", found, "every rank process takes about 0.5 GiB before its weights")
    return Check("memory", "ok", found)


def _kernel() -> Check:
    release = platform.release()
    numbers = tuple(int(number) for number in re.findall(r"\d+", release)[:2])
    if platform.system() != "Linux" or numbers < OLDEST_KERNEL:
        return Check("kernel", "fail", f"{platform.system()} {release}", "leafsum needs Linux 5.4 or newer")
    return Check("kernel", "ok", f"Linux {release}")


def _pidfd() -> Check:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        advice = "a sandbox forbids pidfd_open: allow it (containers: a seccomp profile of this decade)"
        return Check("pidfd", "fail", str(error), advice)
    return Check("pidfd", "ok", "processes can be watched")


def _shared_memory() -> Check:
    path = Path("/dev/shm")
    if not path.is_dir() or not os.access(path, os.W_OK):
        return Check("shared memory", "warn", "/dev/shm cannot be written", "mount a tmpfs there; torch may ask for it")
    stat = os.statvfs(path)
    free_bytes = stat.f_bavail * stat.f_frsize
    found = f"/dev/shm has {free_bytes / 2**20:,.0f} MiB free"
    if free_bytes < LEAST_SHM_BYTES:
        return Check("shared memory", "warn", found, "enlarge it (containers: --shm-size); torch may ask for it")
    return Check("shared memory", "ok", found)


def _run_folder() -> Check:
    from ...ranks.control import IPC_PATH_LIMIT_BYTES
    from ..run_folder import RunFolder

    folder = RunFolder.make(sweeps=False)
    folder.remove()
    base = folder.path.parent
    num_bytes = max(len(os.fsencode(path)) for path in (folder.host_socket, folder.ranks_socket(LATE_GANG)))
    if num_bytes > IPC_PATH_LIMIT_BYTES:
        found = f"socket paths under {base} have {num_bytes} bytes, the kernel takes {IPC_PATH_LIMIT_BYTES}"
        return Check("run folder", "fail", found, "set TMPDIR to a shorter folder")
    return Check("run folder", "ok", f"a private folder under {base}")


def _variables(environ: Mapping[str, str]) -> Check:
    try:
        refuse_unknown_variables(environ)
    except LeafsumError as error:
        return Check("variables", "fail", str(error), "unset it, or correct its name")
    names = sorted(name for name in environ if name.startswith("LEAFSUM_"))
    return Check("variables", "ok", ", ".join(names) or "no LEAFSUM_* variable is set")


def _gpus() -> Check:
    return Check("gpus", "ok", "not used by this version")
