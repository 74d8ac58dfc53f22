"""One rank process: `python -m leafsum.ranks.worker`, started by the coordinator, or by a launcher that owns it.

The main thread sits in one poll over the control socket, its monitor, an eventfd and what tells of the coordinator's
end. One worker thread does whatever may block (imports, weights, steps: Gloo blocks its caller) and writes the eventfd
when it is done. So a rank that waits for its peers still hears that it shall leave, and nothing spins.

A rank never goes on after an error, and is never silent about one: it sends a Failure, or ends.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import setproctitle
import zmq

from ..errors import DeadlineExceeded, ProtocolError, TransportError
from .control import END_TIMEOUT_S, die_with_parent, end_if_stopped, open_socket, poll, rank_identity
from .journal import Journal
from .logs import configure_logs
from .messages import (
    LEFT_UNHEARD,
    LEFT_WITH_FAILURE,
    MAX_TEXT_CHARACTERS,
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

NUM_SLOTS_TOLD = 8
"""Slots of a plan that its event names."""


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
    """The rank's main loop: Hello, Setup, Ready, then a StepResult for every Plan.

    `end_fds` become readable when the coordinator ends or wants this rank to leave: death pipes, a pidfd.
    """

    def __init__(self, socket_path: Path, run_id: str, rank: int, end_fds: list[int], parent_pid: int = 0) -> None:
        self.run_id = run_id
        self.rank = rank
        self.end_fds = end_fds
        self.parent_pid = parent_pid
        self.step = -1
        self.engine: Engine | None = None
        self.busy = False
        self.journal = Journal(log, run_id, rank)
        self.journal.note("started", pid=os.getpid())
        self.thread = StepThread()
        self.socket = open_socket(
            zmq.Context(), zmq.DEALER, socket_path, bind=False, identity=rank_identity(run_id, rank)
        )
        self.breaks = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        """Readable when the connection was lost: its peer closed it, or either got what is no frame, or too large."""
        self.poller = zmq.Poller()
        for source in (self.socket, self.breaks, self.thread.done_fd, *end_fds):
            self.poller.register(source, zmq.POLLIN)

    def run(self) -> None:
        """Serve until the coordinator's end or an error. Never returns to the caller's cleanup: see `leave`."""
        try:
            self._serve()
        except Exception as error:
            self._fail(error)

    def _serve(self) -> None:
        self._send(Hello(protocol=PROTOCOL_VERSION, run_id=self.run_id, rank=self.rank, pid=os.getpid()))
        self.journal.note("hello")
        setup_deadline_s = time.monotonic() + SETUP_TIMEOUT_S
        while True:
            waiting_for_setup = self.engine is None and not self.busy
            timeout_s = setup_deadline_s - time.monotonic() if waiting_for_setup else None
            ready = poll(self.poller, timeout_s)
            if ready.intersection(self.end_fds):
                self._leave_as_told()
            if self.breaks in ready:
                self._leave_unheard("the connection to the coordinator broke")
            if self.thread.done_fd in ready:
                self._finish_call()
            if self.socket in ready:
                self._hear(self.socket.recv_multipart())
            if not ready:
                raise DeadlineExceeded(
                    f"rank {self.rank} got no Setup within {SETUP_TIMEOUT_S:g} s of its Hello",
                    what="setup",
                    timeout_s=SETUP_TIMEOUT_S,
                )

    def _hear(self, frames: list[bytes]) -> None:
        if len(frames) != 1:
            raise ProtocolError(f"expected one frame of the coordinator, got {len(frames)}")
        message = decode(frames[0], TO_RANK)
        if self.busy:
            raise ProtocolError(f"expected nothing while step {self.step} is under way, got {type(message).__name__}")
        if isinstance(message, Setup):
            self.journal.note("setup", model=message.model_dir, num_ranks=message.num_ranks)
            self._start(lambda: self._load(message))
        else:
            self.step = message.step
            self._note_plan(message)
            self._start(lambda: self._execute(message))

    def _note_plan(self, plan: Plan) -> None:
        num_rows = sum([len(run.token_ids) or 1 for run in plan.runs])
        slots = ",".join([str(run.slot) for run in plan.runs[:NUM_SLOTS_TOLD]])
        more = "+" if len(plan.runs) > NUM_SLOTS_TOLD else ""
        self.journal.note("plan", plan.step, rows=num_rows, runs=len(plan.runs), slots=slots + more)

    def _start(self, call: Callable[[], FromRank]) -> None:
        self.busy = True
        self.thread.start(lambda: self._guarded(call))

    def _guarded(self, call: Callable[[], FromRank]) -> FromRank:
        try:
            return call()
        except BaseException as error:  # a SystemExit would end the thread alone, and nobody would hear of it
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
        self.journal.note("loading")
        self.engine, ready = load_engine(setup, self.journal)
        self.journal.note(
            "ready",
            level=logging.INFO,
            exchange=ready.exchange,
            transport=ready.transport,
            device=ready.device,
            instruction_set=ready.versions["instruction_set"],
        )
        return ready

    def _execute(self, plan: Plan) -> StepResult:
        if self.engine is None:
            raise ProtocolError(f"plan {plan.step} came before Setup")
        return self.engine.execute(plan)

    def _finish_call(self) -> None:
        self.busy = False
        answer = self.thread.answer()
        if isinstance(answer, Failure):
            self._send(answer)
            self.leave(LEFT_WITH_FAILURE)
        self._send(answer)
        if isinstance(answer, StepResult):
            self.journal.note("done", answer.step)

    def _failure(self, error: BaseException) -> Failure:
        """Notes the error, and says it with all that was noted before."""
        text = text_of(error)
        self.journal.note("failed", self.step, level=logging.INFO, kind=type(error).__name__, text=text)
        return Failure(
            rank=self.rank,
            step=self.step,
            kind=type(error).__name__,
            text=text[:MAX_TEXT_CHARACTERS],
            traceback_text=encodable("".join(traceback.format_exception(error)))[-MAX_TEXT_CHARACTERS:],
            transport=isinstance(error, TransportError | DeadlineExceeded),
            events=self.journal.events,
        )

    def _fail(self, error: Exception) -> None:
        failure = self._failure(error)
        try:
            self._send(failure)
        except Exception as second_error:
            self._leave_unheard(f"the failure could not be sent: {text_of(second_error)}")
        self.leave(LEFT_WITH_FAILURE)

    def _send(self, message: FromRank) -> None:
        self.socket.send(encode(message))

    def _leave_as_told(self) -> None:
        if os.getppid() == self.parent_pid:  # the program has ended, and its coordinator has not: is it able to?
            end_if_stopped(self.parent_pid)
        self.journal.note("leaving", self.step, level=logging.INFO)
        self.leave(0)

    def _leave_unheard(self, cause: str) -> None:
        ends = zmq.Poller()
        for fd in self.end_fds:
            ends.register(fd, zmq.POLLIN)
        if poll(ends, END_TIMEOUT_S):
            self._leave_as_told()
        self.journal.note("unheard", self.step, level=logging.ERROR, text=cause)
        self.socket.context.destroy(linger=0)
        os._exit(LEFT_UNHEARD)

    def leave(self, exit_status: int) -> None:
        """Deliver what is queued and end the process at once.

        No interpreter shutdown: it would run destructors of a process group whose peers may be gone, and those can
        hang.
        """
        self.socket.context.destroy()
        os._exit(exit_status)


def text_of(error: BaseException) -> str:
    try:
        return encodable(str(error) or repr(error))
    except Exception:
        return f"{type(error).__name__}, which cannot say why"


def encodable(text: str) -> str:
    """As UTF-8 takes it: the name of a file may hold bytes that are no character."""
    return text.encode(errors="backslashreplace").decode()


def end_fds_of(death_fds: str, coordinator_pid: int) -> list[int]:
    """Descriptors of death pipes, as a text with commas between, and a pidfd of the coordinator (0: none).

    Ends this process where the coordinator has ended already.
    """
    found = [int(fd) for fd in death_fds.split(",") if fd]
    if coordinator_pid:
        try:
            found.append(os.pidfd_open(coordinator_pid))
        except ProcessLookupError:
            os._exit(1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="leafsum.ranks.worker", description="A rank process of one gang.")
    parser.add_argument("--socket", type=Path, required=True, help="the gang's control socket")
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--log-level", default="warning")
    parser.add_argument("--parent-pid", type=int, default=0, help="end when this process, which is the parent, ends")
    parser.add_argument("--death-fd", default="", help="descriptors of death pipes, with commas between")
    parser.add_argument("--coordinator-pid", type=int, default=0, help="end when this process ends, whoever's child")
    args = parser.parse_args()
    if not args.death_fd and not args.coordinator_pid:
        parser.error("expected --death-fd or --coordinator-pid: a rank must see the end of its coordinator")
    if args.parent_pid:
        die_with_parent(args.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # it ends the process as SIGTERM does, with no interpreter shutdown
    configure_logs(args.log_level, args.run_id, args.rank)
    setproctitle.setproctitle(f"leafsum: rank {args.rank}/{args.tp} {args.run_id}")
    Worker(args.socket, args.run_id, args.rank, end_fds_of(args.death_fd, args.coordinator_pid), args.parent_pid).run()


if __name__ == "__main__":
    main()
