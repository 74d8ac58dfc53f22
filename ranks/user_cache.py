"""The user's cache folder. Whatever lies in it can be made again."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ..errors import ConfigError

UNFINISHED_MAX_AGE_S = 3600.0
"""Making a folder takes seconds: an unfinished one this old was left by a maker that was killed."""


def user_cache_dir() -> Path:
    """$XDG_CACHE_HOME/leafsum, by default ~/.cache/leafsum; it may not exist yet. ConfigError without any home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base or Path.home() / ".cache") / "leafsum"
    except RuntimeError:
        raise ConfigError(
            "expected a home folder for the cache, this user has none; set XDG_CACHE_HOME to a folder you can write"
        ) from None


def made_once(what: str, name: str, write: Callable[[Path], None]) -> Path:
    """The folder `name` (KIND-VERSION) of the cache; `write` fills it on first use.

    Two processes at once may both make it: one wins. Raises ConfigError where the cache cannot be written.
    """
    cache = user_cache_dir()
    folder = cache / name
    try:
        _remove_unfinished(cache, name.rpartition("-")[0])
        if not folder.is_dir():
            cache.mkdir(parents=True, exist_ok=True)
            _make(folder, write)
    except OSError as error:
        raise ConfigError(
            f"{what} is made in the cache folder {cache}, which cannot be written: {error.strerror or error}. "
            "Set XDG_CACHE_HOME to a folder you can write"
        ) from error
    return folder


def _make(folder: Path, write: Callable[[Path], None]) -> None:
    """Write it beside its place and rename it: a folder of that name is always whole."""
    unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        write(unfinished)
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _remove_unfinished(cache: Path, kind: str) -> None:
    for folder in cache.glob(f"{kind}-*-*"):
        with contextlib.suppress(OSError):  # its maker, or another process that tidies up, was quicker
            if time.time() - folder.stat().st_mtime > UNFINISHED_MAX_AGE_S:
                shutil.rmtree(folder, ignore_errors=True)
