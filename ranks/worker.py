"""One rank process: `python -m leafsum.ranks.worker`, started by the coordinator.

The main thread sits in one poll over the control socket, an eventfd and the coordinator's death pipe. One worker
thread does whatever may block (imports, weights, steps: Gloo blocks its caller) and writes the eventfd when it is
done. So a rank that waits for its peers still hears that it shall leave, and nothing spins.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import setproctitle
import zmq

from ..errors import DeadlineExceeded, LeafsumError, ProtocolError, TransportError
from .control import die_with_parent, open_socket, poll, rank_identity
from .messages import (
    LEFT_WITH_FAILURE,
    PROTOCOL_VERSION,
    TO_RANK,
    Failure,
    FromRank,
    Hello,
    Plan,
    Ready,
    Setup,
    StepResult,
    decode,
    encode,
)

if TYPE_CHECKING:
    from .engine import Engine

log = logging.getLogger("leafsum.worker")

SETUP_TIMEOUT_S = 60.0
"""How long a rank waits for its Setup; the coordinator answers a Hello at once."""


class StepThread:
    """One thread that runs what the main thread must not wait for, one call at a time."""

    def __init__(self) -> None:
        self.done_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._calls: queue.SimpleQueue[Callable[[], FromRank]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[FromRank] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="leafsum-step", daemon=True).start()

    def start(self, call: Callable[[], FromRank]) -> None:
        self._calls.put(call)

    def answer(self) -> FromRank:
        """What the finished call answers. Call it once for each time that `done_fd` is readable."""
        os.eventfd_read(self.done_fd)
        return self._answers.get()

    def _run(self) -> None:
        while True:
            self._answers.put(self._calls.get()())
            os.eventfd_write(self.done_fd, 1)


class Worker:
    """The rank's main loop: Hello, Setup, Ready, then a StepResult for every Plan."""

    def __init__(self, run_folder: Path, run_id: str, rank: int, death_fds: list[int]) -> None:
        self.run_id = run_id
        self.rank = rank
        self.death_fds = death_fds
        self.step = -1
        self.engine: Engine | None = None
        self.busy = False
        self.thread = StepThread()
        self.socket = open_socket(
            zmq.Context(), zmq.DEALER, run_folder / "ranks.sock", bind=False, identity=rank_identity(run_id, rank)
        )
        self.poller = zmq.Poller()
        for source in (self.socket, self.thread.done_fd, *death_fds):
            self.poller.register(source, zmq.POLLIN)

    def run(self) -> None:
        """Serve until the death pipe closes or something fails. Never returns to the caller's cleanup: see `leave`."""
        self._send(Hello(protocol=PROTOCOL_VERSION, run_id=self.run_id, rank=self.rank, pid=os.getpid()))
        setup_deadline_s = time.monotonic() + SETUP_TIMEOUT_S
        while True:
            waiting_for_setup = self.engine is None and not self.busy
            timeout_s = setup_deadline_s - time.monotonic() if waiting_for_setup else None
            ready = poll(self.poller, timeout_s)
            if ready.intersection(self.death_fds):
                self.leave(0)
            if self.thread.done_fd in ready:
                self._finish_call()
            if self.socket in ready:
                self._hear(self.socket.recv())
            if not ready:
                self._fail(
                    DeadlineExceeded(
                        f"rank {self.rank} got no Setup within {SETUP_TIMEOUT_S:g} s of its Hello",
                        what="setup",
                        timeout_s=SETUP_TIMEOUT_S,
                    )
                )

    def _hear(self, frame: bytes) -> None:
        try:
            message = decode(frame, TO_RANK)
            if self.busy:
                raise ProtocolError(
                    f"expected nothing while step {self.step} is under way, got {type(message).__name__}"
                )
            if isinstance(message, Setup):
                self._start(lambda: self._load(message))
            else:
                self.step = message.step
                self._start(lambda: self._execute(message))
        except LeafsumError as error:
            self._fail(error)

    def _start(self, call: Callable[[], FromRank]) -> None:
        self.busy = True
        self.thread.start(lambda: self._guarded(call))

    def _guarded(self, call: Callable[[], FromRank]) -> FromRank:
        try:
            return call()
        except Exception as error:
            return self._failure(error)

    def _load(self, setup: Setup) -> Ready:
        # The slow imports (torch: 1.6 s) belong to the step thread: the main thread already listens. They make 250,000
        # objects that stay: to look for garbage among them takes a fifth longer here, and time in later steps.
        gc.disable()
        from .start import load_engine

        gc.freeze()
        gc.enable()

        if self.engine is not None or setup.rank != self.rank or setup.protocol != PROTOCOL_VERSION:
            raise ProtocolError(
                f"expected one Setup for rank {self.rank} at protocol {PROTOCOL_VERSION}, "
                f"got one for rank {setup.rank} at {setup.protocol}"
            )
        log.info("run %s: reading %s for rank %d of %d", self.run_id, setup.model_dir, setup.rank, setup.num_ranks)
        self.engine, ready = load_engine(setup)
        log.info(
            "run %s: ready, exchange %s, transport %s, kernels %s",
            self.run_id,
            ready.exchange,
            ready.transport,
            ready.versions["instruction_set"],
        )
        return ready

    def _execute(self, plan: Plan) -> StepResult:
        if self.engine is None:
            raise ProtocolError(f"plan {plan.step} came before Setup")
        return self.engine.execute(plan)

    def _finish_call(self) -> None:
        self.busy = False
        answer = self.thread.answer()
        self._send(answer)
        if isinstance(answer, Failure):
            self.leave(LEFT_WITH_FAILURE)

    def _failure(self, error: Exception) -> Failure:
        return Failure(
            rank=self.rank,
            step=self.step,
            kind=type(error).__name__,
            text=str(error) or repr(error),
            traceback_text="".join(traceback.format_exception(error)),
            transport=isinstance(error, TransportError | DeadlineExceeded),
        )

    def _fail(self, error: Exception) -> None:
        self._send(self._failure(error))
        self.leave(LEFT_WITH_FAILURE)

    def _send(self, message: FromRank) -> None:
        self.socket.send(encode(message))

    def leave(self, exit_status: int) -> None:
        """Deliver what is queued and end the process at once.

        No interpreter shutdown: it would run destructors of a process group whose peers may be gone, and those can
        hang.
        """
        self.socket.context.destroy()
        os._exit(exit_status)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="leafsum.ranks.worker", description="A rank process; the coordinator starts it."
    )
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--log-level", default="warning")
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--death-fd", required=True, help="descriptors of death pipes, with commas between")
    args = parser.parse_args()
    die_with_parent(args.parent_pid)
    logging.basicConfig(level=args.log_level.upper(), format=f"%(asctime)s rank {args.rank} %(levelname)s %(message)s")
    setproctitle.setproctitle(f"leafsum: rank {args.rank}/{args.tp} {args.run_id}")
    Worker(args.run_folder, args.run_id, args.rank, [int(fd) for fd in args.death_fd.split(",")]).run()


if __name__ == "__main__":
    main()
