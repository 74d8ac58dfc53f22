"""What a receipt says about where it was made: code, packages and machine."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from ...ranks.machine import cpu_name

PACKAGES = ("leafsum", "torch", "numpy", "msgspec", "pyzmq", "safetensors", "tokenizers", "jinja2", "click", "rich")
GIT_TIMEOUT_S = 10.0


def code_facts() -> dict[str, Any]:
    """Version, and the commit when the package is run from its own checkout; "unknown" outside one."""
    root = Path(__file__).resolve().parents[2]
    facts: dict[str, Any] = {"version": package_versions()["leafsum"], "commit": "unknown", "changed": None}
    top_level = _git(root, "rev-parse", "--show-toplevel")
    # An installed package may lie inside somebody else's repository: only its own counts.
    if top_level is None or Path(top_level).resolve() != root:
        return facts
    facts["commit"] = _git(root, "rev-parse", "--verify", "--quiet", "HEAD") or "unknown"
    status = _git(root, "status", "--porcelain")
    facts["changed"] = None if status is None else bool(status)
    return facts


def package_versions() -> dict[str, str]:
    """Versions by name without importing any of them; "missing" where there is none."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def machine_facts() -> dict[str, Any]:
    """The processor as the kernel names it, cores this process may use, memory, kernel, kernels' instruction set."""
    return {
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes(),
        "kernel": platform.release(),
        "instruction_set": _instruction_set(),
    }


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _instruction_set() -> str:
    from ... import _C

    return _C.instruction_set()


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
