"""Files that are written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from ...errors import ConfigError, OutputError


def require_writable(path: Path) -> None:
    """Refuse, before anything runs, a file that could not be written at the end."""
    try:
        if path.exists() and not path.is_file():
            raise OSError(None, "it is no regular file")
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(descriptor)
        os.unlink(name)
    except OSError as error:
        raise ConfigError(f"--out: cannot write {path}: {error.strerror}; name a file that you may write") from error


def write_receipt(path: Path, receipt: dict[str, Any]) -> None:
    try:
        write_atomically(path, json.dumps(receipt, indent=1) + "\n")
    except OSError as error:
        raise OutputError(f"--out: cannot write {path}: {error.strerror}; the receipt is lost") from error


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
