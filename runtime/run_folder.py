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
import stat
import tempfile
import weakref
from collections.abc import Iterator
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
    def make(cls, *, sweeps: bool = True) -> RunFolder:
        """A new folder under TMPDIR that only this user can enter (0700): the guard of the sockets in it.

        It goes with `remove`, with this object, or with the program. `sweeps`: those of dead runs are removed.
        Raises ConfigError where there can be none, or none that is safe.
        """
        base = Path(tempfile.gettempdir())
        if sweeps:
            remove_abandoned(base)
        try:
            refuse_unsafe(base)
            while True:
                run_id = secrets.token_hex(6)
                folder = cls(base / f"{PREFIX}{run_id}", run_id)
                # Before the folder exists: an interrupt right after mkdir leaves nothing either.
                removal = weakref.finalize(folder, _remove, folder.path, folder._hold_fds, folder._owner_pid)
                try:
                    folder.path.mkdir(mode=0o700)
                except FileExistsError:  # whoever's it is, it is not this run's
                    removal.detach()
                    continue
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
        fcntl.flock(self._hold_fds[-1], fcntl.LOCK_SH)

    def restore(self) -> None:
        """Make the folder again where somebody has removed it, such as one who cleans up TMPDIR.

        Raises ConfigError where it cannot be, or has been made by another user meanwhile.
        """
        try:
            self.path.mkdir(mode=0o700)
        except FileExistsError:
            if self.path.lstat().st_uid != os.getuid():
                raise ConfigError(f"{self.path} is another user's; expected this run's folder") from None
        except OSError as error:
            raise ConfigError(f"cannot make the run folder {self.path} again: {error.strerror}") from error
        else:
            self.hold()

    def remove(self) -> None:
        """Remove the folder. Safe to call again, and while another process does the same."""
        _remove(self.path, self._hold_fds, self._owner_pid)

    @property
    def host_socket(self) -> Path:
        return self.path / "host.sock"

    def ranks_socket(self, gang_number: int) -> Path:
        """Every gang of a run has its own, so that a late word of a lost one reaches nobody."""
        return self.path / f"ranks-{gang_number:06}.sock"  # as long for every gang: paths have a limit

    def store(self, gang_number: int) -> Path:
        """The rendezvous file of a gang's data plane."""
        return self.path / f"data-{gang_number}.store"

    def remove_gang(self, gang_number: int) -> None:
        """Remove what a gang that has ended left here."""
        for path in (self.ranks_socket(gang_number), self.store(gang_number)):
            path.unlink(missing_ok=True)


def _remove(path: Path, hold_fds: list[int], owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return  # a forked copy of the process: the folder is not its own
    shutil.rmtree(path, ignore_errors=True)
    while hold_fds:
        os.close(hold_fds.pop())


def lock_of(path: Path) -> Path:
    return path / "held"


def refuse_unsafe(base: Path) -> None:
    """Raise ConfigError where anybody may put another folder in the place of a run's."""
    mode = base.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise ConfigError(
            f"everybody can rename what others have in {base} (mode {stat.S_IMODE(mode):o}, no sticky bit), a run's "
            "sockets among it. Set TMPDIR to a folder of your own, or chmod +t that one"
        )


def abandoned_in(base: Path) -> list[Path]:
    """This user's run folders that nobody holds."""
    found = []
    for path in sorted(base.glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError), _taken(path):
            found.append(path)
    return found


def remove_abandoned(base: Path) -> None:
    """Remove this user's run folders that nobody holds. One without a lock file is being made: it stays."""
    for path in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), _taken(path):
            shutil.rmtree(path)


@contextlib.contextmanager
def _taken(path: Path) -> Iterator[None]:
    """Hold a run folder that nobody else does. Raises OSError for a link, another user's folder, and one in use."""
    folder_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(folder_fd).st_uid != os.getuid():
            raise PermissionError(f"{path} is another user's")
        fd = os.open(lock_of(path).name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(fd)
    finally:
        os.close(folder_fd)
