"""The user's cache folder. Whatever lies in it can be made again."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ConfigError


def user_cache_dir() -> Path:
    """$XDG_CACHE_HOME/leafsum, by default ~/.cache/leafsum; it may not exist yet. ConfigError without any home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base or Path.home() / ".cache") / "leafsum"
    except RuntimeError:
        raise ConfigError(
            "expected a home folder for the cache, this user has none; set XDG_CACHE_HOME to a folder you can write"
        ) from None
