"""The private folder of one run. Every name in it derives from the run id, so two runs on a machine never meet."""

from __future__ import annotations

import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError


@dataclass(frozen=True, slots=True)
class RunFolder:
    path: Path
    run_id: str

    @classmethod
    def make(cls) -> RunFolder:
        """A new folder under TMPDIR that only this user can enter (0700): the guard of the sockets in it."""
        run_id = secrets.token_hex(6)
        path = Path(tempfile.gettempdir()) / f"leafsum-{run_id}"
        try:
            path.mkdir(mode=0o700)
        except OSError as error:
            raise ConfigError(
                f"cannot make the run folder {path}: {error.strerror}. Set TMPDIR to a folder you can write"
            ) from error
        return cls(path, run_id)

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
