"""A real rank process that a test drives over its socket, in the coordinator's place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import zmq
from leafsum.ranks.control import open_socket, rank_identity
from leafsum.ranks.messages import (
    FROM_RANK,
    LEFT_WITH_FAILURE,
    Failure,
    FromRank,
    Message,
    decode,
    encode,
)
from leafsum.runtime.child import Child, end_processes
from leafsum.runtime.run_folder import RunFolder
from setups import RUN_ID

TESTS = Path(__file__).resolve().parent
WAIT_S = 60.0


class Rank:
    """Rank 0: its process, and the coordinator's end of its socket."""

    def __init__(
        self, folder: RunFolder, module: str = "leafsum.ranks.worker", parent_pid: int = 0, **environ: str
    ) -> None:
        self.context: zmq.Context = zmq.Context()
        self.socket = open_socket(self.context, zmq.ROUTER, folder.ranks_socket(0), bind=True)
        self.identity = rank_identity(RUN_ID, 0)
        arguments = [*arguments_of(folder), "--parent-pid", str(parent_pid or os.getpid())]
        self.log_path = folder.path / "stderr"
        with standard_error_to(self.log_path):
            self.child = Child("rank 0", module, arguments, env={**os.environ, "PYTHONPATH": search_path(), **environ})

    def say(self, message: Message) -> None:
        self.say_bytes(encode(message))

    def say_bytes(self, frame: bytes) -> None:
        self.socket.send_multipart([self.identity, frame])

    def hear(self) -> FromRank:
        assert self.socket.poll(WAIT_S * 1000), "the rank is silent"
        identity, frame = self.socket.recv_multipart()
        assert identity == self.identity
        return decode(frame, FROM_RANK)

    def hear_failure(self) -> Failure:
        """The rank's last word: after it the process leaves, and says nothing more."""
        failure = self.hear()
        assert isinstance(failure, Failure)
        assert self.child.wait(WAIT_S) == LEFT_WITH_FAILURE
        assert not self.socket.poll(0)
        return failure

    def log_lines(self) -> list[str]:
        return self.log_path.read_text().splitlines()

    def close(self) -> None:
        end_processes([self.child], 0.0)
        self.context.destroy(linger=0)


def arguments_of(folder: RunFolder) -> list[str]:
    arguments = ["--socket", str(folder.ranks_socket(0)), "--run-id", RUN_ID, "--rank", "0", "--tp", "1"]
    return [*arguments, "--log-level", "debug"]


@contextlib.contextmanager
def standard_error_to(path: Path) -> Iterator[None]:
    """For the children that are started meanwhile."""
    own_fd = os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(own_fd, 2)
        os.close(own_fd)


def search_path() -> str:
    return os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
