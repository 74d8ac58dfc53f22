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
import weakref
from pathlib import Path

from ..errors import ConfigError

PREFIX = "leafsum-"


class RunFolder:
    def __init__(self, path: Path, run_id: str) -> None:
        self.path = path
        self.run_id = run_id
        self._hold_fds: list[int] = []
        self._owner_pid = os.getpid()

    @classmethod
    def make(cls) -> RunFolder:
        """A new folder under TMPDIR that only this user can enter (0700): the guard of the sockets in it.

        It goes with `remove`, with this object, or with the program.
        """
        base = Path(tempfile.gettempdir())
        remove_abandoned(base)
        try:
            while True:
                run_id = secrets.token_hex(6)
                folder = cls(base / f"{PREFIX}{run_id}", run_id)
                # Before the folder exists: an interrupt right after mkdir leaves nothing either.
                weakref.finalize(folder, _remove, folder.path, folder._hold_fds, folder._owner_pid)
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
        self._hold_fds.append(os.open(lock_of(self.path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        fcntl.flock(self._hold_fds[0], fcntl.LOCK_SH)

    def remove(self) -> None:
        """Remove the folder. Safe to call again, and while another process does the same."""
        _remove(self.path, self._hold_fds, self._owner_pid)

    @property
    def ranks_socket(self) -> Path:
        return self.path / "ranks.sock"

    @property
    def host_socket(self) -> Path:
        return self.path / "host.sock"

    @property
    def store(self) -> Path:
        """The rendezvous file of the data plane."""
        return self.path / "data.store"


def _remove(path: Path, hold_fds: list[int], owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return  # a forked copy of the process: the folder is not its own
    shutil.rmtree(path, ignore_errors=True)
    while hold_fds:
        os.close(hold_fds.pop())


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
