"""The private folder of one run. Every name in it derives from the run id, so two runs on a machine never meet.

A folder is held (a shared lock on a file in it) by its pool and by its coordinator. One that nobody holds is what a run
left that was killed whole; the next run of the same user removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from pathlib import Path

from ..errors import ConfigError

PREFIX = "leafsum-"


class RunFolder:
    def __init__(self, path: Path, run_id: str) -> None:
        self.path = path
        self.run_id = run_id
        self._hold_fd = -1

    @classmethod
    def make(cls) -> RunFolder:
        """A new folder under TMPDIR that only this user can enter (0700): the guard of the sockets in it."""
        base = Path(tempfile.gettempdir())
        remove_abandoned(base)
        try:
            while True:
                run_id = secrets.token_hex(6)
                folder = cls(base / f"{PREFIX}{run_id}", run_id)
                folder.path.mkdir(mode=0o700)
                folder.hold()
                if lock_of(folder.path).exists():  # nobody took it for abandoned before it was held
                    return folder
        except OSError as error:
            raise ConfigError(
                f"cannot make a run folder in {base}: {error.strerror}. Set TMPDIR to a folder you can write"
            ) from error

    def hold(self) -> None:
        """Keep others from taking the folder for abandoned, for as long as this process lives."""
        self._hold_fd = os.open(lock_of(self.path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._hold_fd, fcntl.LOCK_SH)

    def remove(self) -> None:
        """Remove the folder. Safe to call again, and while another process does the same."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._hold_fd >= 0:
            os.close(self._hold_fd)
            self._hold_fd = -1

    @property
    def ranks_socket(self) -> Path:
        return self.path / "ranks.sock"

    @property
    def host_socket(self) -> Path:
        return self.path / "host.sock"

    @property
    def store(self) -> Path:
        """The rendezvous file of the data plane."""
        return self.path / "gloo.store"


def lock_of(path: Path) -> Path:
    return path / "held"


def remove_abandoned(base: Path) -> None:
    """Remove this user's run folders that nobody holds. One without a lock file is being made: it stays."""
    for path in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid != os.getuid():
                continue
            fd = os.open(lock_of(path), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(fd)
