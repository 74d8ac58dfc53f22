"""Where the rank processes of a gang come from: started here, or by somebody else who owns them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from ..errors import LeafsumError
from .child import LIMITS_HINT, Child, Process


class Launcher(Protocol):
    """What a gang asks for its ranks."""

    can_launch_again: bool
    """Whether a lost gang can be had again."""

    def launch(self, rank: int, num_ranks: int, socket_path: Path, /) -> Process | None:
        """The process of a rank, which will say Hello at the socket; None: it runs already, and its Hello tells its
        process id. Raises LeafsumError where it cannot be started.
        """


class Spawner:
    """Starts every rank as a child of this process.

    A rank also watches the program's death pipe: a coordinator that is stopped cannot pass its end on.
    """

    can_launch_again = True

    def __init__(self, run_id: str, log_level: str, host_death_fd: int) -> None:
        self._run_id = run_id
        self._log_level = log_level
        self._host_death_fd = host_death_fd

    def launch(self, rank: int, num_ranks: int, socket_path: Path) -> Process:
        arguments = ["--socket", str(socket_path), "--run-id", self._run_id, "--rank", str(rank)]
        arguments += ["--tp", str(num_ranks), "--parent-pid", str(os.getpid()), "--log-level", self._log_level]
        try:
            return Child(f"rank {rank}", "leafsum.ranks.worker", arguments, rank_environment(), self._host_death_fd)
        except OSError as error:
            raise LeafsumError(f"cannot start rank {rank} of {num_ranks}: {error.strerror}. {LIMITS_HINT}") from error


class Joiner:
    """Ranks that run already, each started with the path of the gang's socket, by a launcher that owns them."""

    can_launch_again = False

    def launch(self, _rank: int, _num_ranks: int, _socket_path: Path) -> None:
        return None


def rank_environment() -> dict[str, str]:
    """A rank inherits this process's environment; its libraries' own thread pools stay out of the way of the
    kernels'.
    """
    return {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
