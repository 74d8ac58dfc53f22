"""SHA-256 of a model's files, kept by path, size and time of change: weights take minutes to read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ...ranks.user_cache import user_cache_dir
from .file import write_atomically

SHOWN_DIGITS = 12
"""Of a SHA-256 in a line of text; the file and --json have all of them."""

HASHED_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model")
CHUNK_BYTES = 1 << 20


def model_files(model_dir: Path, cache_dir: Path | None = None) -> dict[str, str]:
    """SHA-256 (hex) of every weight, configuration and tokenizer file, by name."""
    cache = _HashCache((cache_dir or user_cache_dir()) / "sha256.json")
    paths = sorted(path for path in model_dir.iterdir() if path.suffix in HASHED_SUFFIXES and path.is_file())
    found = {path.name: cache.sha256(path) for path in paths}
    cache.save()
    return found


class _HashCache:
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
