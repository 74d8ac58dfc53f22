"""Ranks that somebody else has started: a coordinator takes and watches them, and never starts others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from leafsum.ranks.checkpoint import Checkpoint
from leafsum.ranks.configs.load import load_spec
from leafsum.ranks.control import open_socket
from leafsum.ranks.messages import Message, decode, encode
from leafsum.ranks.tiny import ensure_tiny
from leafsum.runtime.coordinator import Coordinator
from leafsum.runtime.launcher import Joiner
from leafsum.runtime.messages import FROM_COORDINATOR, Fatal, Finished, FromCoordinator, Order, Start, Started, Submit
from leafsum.runtime.pool import WorkerPool
from leafsum.runtime.run_folder import RunFolder
from leafsum.runtime.sampling import SamplingParams
from leafsum.runtime.settings import Settings

NUM_RANKS = 2
WAIT_S = 60.0
PROMPT = (1, 2, 3)
SETTINGS = Settings(tp=NUM_RANKS, threads=1, kv_tokens=512, recover="same")


class Run:
    """A coordinator in a thread of this process, and ranks that are children of this process, none of its."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path, "0123456789ab")
        self._context: zmq.Context = zmq.Context()
        self._pool = open_socket(self._context, zmq.PAIR, self.folder.host_socket, bind=False)
        self._death_read_fd, self._death_write_fd = os.pipe()
        coordinator = Coordinator(self.folder, self._death_read_fd, Joiner())
        self._thread = threading.Thread(target=coordinator.run, daemon=True)
        self._thread.start()
        self.ranks = [self._start_rank(rank) for rank in range(NUM_RANKS)]
        model_dir = ensure_tiny()
        spec = load_spec(model_dir)
        self.tell(
            Start(
                settings=SETTINGS.to_dict(),
                model_dir=str(model_dir),
                model_digest=Checkpoint.open(model_dir).digest,
                model_stamp=Checkpoint.open(model_dir).stamp(),
                model_max_context=spec.max_context,
                num_layers=spec.num_layers,
            )
        )
        assert self.hear() == Started()

    def _start_rank(self, rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "leafsum.ranks.worker", "--socket", str(self.folder.ranks_socket(0))]
        command += ["--run-id", self.folder.run_id, "--rank", str(rank), "--tp", str(NUM_RANKS)]
        return subprocess.Popen([*command, "--coordinator-pid", str(os.getpid())])

    def submit(self, max_tokens: int) -> None:
        self.tell(Submit(orders=(Order(request_id=0, token_ids=PROMPT, max_tokens=max_tokens, stop_ids=()),)))

    def tell(self, message: Message) -> None:
        self._pool.send(encode(message))

    def hear(self) -> FromCoordinator:
        assert self._pool.poll(WAIT_S * 1000), "the pool heard nothing"
        return decode(self._pool.recv(), FROM_COORDINATOR)

    def close(self) -> None:
        os.close(self._death_write_fd)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        os.close(self._death_read_fd)
        self._context.destroy(linger=0)
        for rank in self.ranks:
            rank.wait(WAIT_S)


@pytest.fixture
def run(tmp_path_factory) -> Iterator[Run]:
    run = Run(tmp_path_factory.mktemp("run"))
    yield run
    run.close()


def test_they_serve_as_others_do_and_are_ended_with_the_run(run):
    run.submit(max_tokens=8)
    told: list[int] = []
    while not isinstance(word := run.hear(), Finished):
        told += word.token_ids
    run.close()
    assert [rank.returncode for rank in run.ranks] == [-signal.SIGTERM] * NUM_RANKS
    with WorkerPool(model="tiny", threads=1, kv_tokens=512) as pool:
        (expected,) = pool.generate([PROMPT], SamplingParams(max_tokens=8, ignore_eos=True))
    assert (tuple(told), f"{word.residual_hash:016x}") == (expected.token_ids, expected.residual_hash)
    run.close = lambda: None


def test_a_death_of_one_is_seen_and_final(run):
    """Who has started them may start them again; the coordinator cannot."""
    run.submit(max_tokens=400)
    run.hear()
    run.ranks[1].kill()
    while not isinstance(word := run.hear(), Fatal):
        pass
    assert (word.kind, word.role) == ("RankLost", "rank 1")
    assert "how it ended is not known here" in word.text
    assert run.ranks[0].wait(WAIT_S) == -signal.SIGTERM
