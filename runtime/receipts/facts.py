"""What a receipt says about where it was made: code, packages, machine, and the model's files."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Any

PACKAGES = ("leafsum", "torch", "numpy", "msgspec", "pyzmq", "safetensors", "tokenizers", "jinja2", "click", "rich")
HASHED_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model")
GIT_TIMEOUT_S = 10.0
CHUNK_BYTES = 1 << 20


def code_facts() -> dict[str, Any]:
    """Version, and the commit when the package is run from its own checkout; "unknown" outside one."""
    root = Path(__file__).resolve().parent.parent
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


def cpu_name() -> str:
    """The model name, on arm64 (where /proc/cpuinfo has none) the implementer and part numbers."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    if "model name" in fields:
        return fields["model name"]
    return f"implementer {fields.get('CPU implementer', '?')} part {fields.get('CPU part', '?')}"


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def model_files(model_dir: Path, cache_dir: Path | None = None) -> dict[str, str]:
    """SHA-256 (hex) of every weight, configuration and tokenizer file, by name."""
    cache = _HashCache((cache_dir or user_cache_dir()) / "sha256.json")
    paths = sorted(path for path in model_dir.iterdir() if path.suffix in HASHED_SUFFIXES and path.is_file())
    found = {path.name: cache.sha256(path) for path in paths}
    cache.save()
    return found


def user_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "leafsum"


class _HashCache:
    """Hashes by path, size and time of change: weights take minutes to read, and receipts come in series."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError):
            found = {}  # a cache that cannot be read is an empty one
        self._known: dict[str, Any] = found if isinstance(found, dict) else {}

    def sha256(self, path: Path) -> str:
        stat = path.stat()
        mark = [stat.st_size, stat.st_mtime_ns]
        key = str(path.resolve())
        known = self._known.get(key)
        if isinstance(known, list) and len(known) == 3 and known[:2] == mark and isinstance(known[2], str):
            return known[2]
        digest = file_sha256(path)
        self._known[key] = [*mark, digest]
        return digest

    def save(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(self._known))
        except OSError:
            return  # a home that cannot be written costs time, not truth


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """The whole text or nothing: no reader and no second writer ever sees half of it. Raises OSError."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _instruction_set() -> str:
    from .. import _C

    return _C.instruction_set()


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
