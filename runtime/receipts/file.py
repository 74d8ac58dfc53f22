"""Receipts as files: written whole or not at all, read within a bound."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ...errors import ConfigError, OutputError

MAX_RECEIPT_BYTES = 1 << 28
"""A receipt of the whole matrix is under a megabyte; the layer hashes of a large model and long prompts are more."""


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


def write_receipt(path: Path, text: str) -> None:
    try:
        write_atomically(path, text)
    except OSError as error:
        raise OutputError(f"--out: cannot write {path}: {error.strerror}; the receipt is lost") from error


def read_text(path: Path) -> str:
    """The file's text. ConfigError for what cannot be a receipt."""
    try:
        if not path.is_file():
            found = "something else" if path.exists() else "nothing"
            raise ConfigError(f"{path}: expected a receipt file, found {found}; name what --out has written")
        size = path.stat().st_size
        if size > MAX_RECEIPT_BYTES:
            raise ConfigError(f"{path}: expected a receipt of at most {MAX_RECEIPT_BYTES:,} bytes, found {size:,}")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected a receipt in JSON: {error}") from error


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
