"""The gang: the rank processes of one run, until one of them fails, and their control socket."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Mapping
from typing import TypeVar

import zmq

from ..errors import (
    ConfigError,
    DeadlineExceeded,
    LeafsumError,
    ModelError,
    ProtocolError,
    RankError,
    RankLost,
)
from ..ranks.control import AWAY_S, LAST_WORDS_MS, open_socket, poll, rank_identity
from ..ranks.journal import Journal, event_line, merged_lines
from ..ranks.messages import (
    FROM_RANK,
    LEFT_WITH_FAILURE,
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
from .agreement import check_hellos, check_ready
from .child import EXIT_UNKNOWN, STOPPED, Process, describe_exit, end_processes
from .launcher import Launcher
from .run_folder import RunFolder

log = logging.getLogger("leafsum.gang")

LEAVE_TIMEOUT_S = 3.0
"""How long ranks may take to leave once their death pipes are closed; then SIGTERM."""

CAUSE_TIMEOUT_S = 2.0
"""After a rank reports a broken exchange: how long to look for the rank that broke it."""

A = TypeVar("A", Hello, Ready, StepResult)


class HostGone(Exception):
    """The program that owns this coordinator has closed its pool, or is dead."""


class Gang:
    """The ranks of one run, until one of them fails; a run may have several gangs, one after the other.

    `collect` is the only wait for them: every answer, a death and a deadline end in it alike.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        run_folder: RunFolder,
        launcher: Launcher,
        host_death_fd: int,
        *,
        num_ranks: int,
        number: int,
    ) -> None:
        self.num_ranks = num_ranks
        self.number = number
        self.run_id = run_folder.run_id
        self.step = -1
        """The last that was begun."""
        self.is_under_way = False
        """Whether that step is under way."""
        self.processes: dict[int, Process] = {}
        """By rank."""
        self.readies: list[Ready] = []
        self.poller = zmq.Poller()
        self.socket = open_socket(context, zmq.ROUTER, run_folder.ranks_socket(number), bind=True)
        self.host_death_fd = host_death_fd
        for source in (self.socket, host_death_fd):
            self.poller.register(source, zmq.POLLIN)
        self._launcher = launcher
        self._run_folder = run_folder
        self._identities = {rank_identity(self.run_id, rank): rank for rank in range(num_ranks)}
        self._journals = [Journal(log, self.run_id, rank) for rank in range(num_ranks)]

    def start(self, setups: list[Setup], *, settings_digest: str, model_digest: str, timeout_s: float) -> None:
        """Launch the ranks, set them up, and see that they are alike. Raises whatever `collect` does, RankMismatch,
        and LeafsumError where a process cannot be started.
        """
        begin_s = time.monotonic()
        for rank in range(self.num_ranks):
            self._watch(rank, self._launcher.launch(rank, self.num_ranks, self._run_folder.ranks_socket(self.number)))
        hellos = self.collect(Hello, "the first word of every rank", timeout_s, begin_s)
        check_hellos(hellos, self.run_id)
        for hello in hellos:
            if hello.rank not in self.processes:
                self._watch(hello.rank, running_process(hello))
        for identity, setup in zip(self._identities, setups, strict=True):
            self._journals[setup.rank].note("setup-sent", self.step)
            self._send_to(identity, encode(setup))
        self.readies = self.collect(Ready, "loading the model", timeout_s, begin_s)
        check_ready(self.readies, settings_digest, model_digest)

    def _watch(self, rank: int, process: Process | None) -> None:
        """Liveness is registered before the rank does anything slow."""
        if process is not None:
            self.processes[rank] = process
            self.poller.register(process.pidfd, zmq.POLLIN)
            self._journals[rank].note("started", self.step, pid=process.pid, gang=self.number)

    def send_plan(self, plan: Plan) -> None:
        """To every rank."""
        self.step, self.is_under_way = plan.step, True
        frame = encode(plan)
        for identity, rank in self._identities.items():
            self._journals[rank].note("plan-sent", self.step, num_runs=len(plan.runs))
            self._send_to(identity, frame)

    def collect(self, kind: type[A], what: str, timeout_s: float, begin_s: float | None = None) -> list[A]:
        """One answer of `kind` from every rank, in rank order, within `timeout_s` of `begin_s` (None: of now).

        Raises RankError (a rank reported an exception), RankLost (it died), DeadlineExceeded, ProtocolError, HostGone.
        """
        answers: dict[int, A] = {}
        deadline_s = (time.monotonic() if begin_s is None else begin_s) + timeout_s
        while len(answers) < self.num_ranks:
            if not self.poll(deadline_s - time.monotonic()):
                if time.monotonic() > deadline_s + AWAY_S:  # this process was stopped, and the ranks maybe with it
                    deadline_s = time.monotonic() + timeout_s
                    continue
                raise self._late(what, timeout_s, answers)
            message = self._receive()
            if message is None:
                continue
            if isinstance(message, Failure):
                raise self._cause(message)
            if not isinstance(message, kind) or message.rank in answers:
                told = f"expected one {kind.__name__} of each rank, got {type(message).__name__}"
                raise self._breach(message.rank, told)
            answers[message.rank] = message
        self.is_under_way = False
        return [answers[rank] for rank in range(self.num_ranks)]

    def poll(self, timeout_s: float | None) -> bool:
        """Wait for a rank's word; False when `timeout_s` ran out or another watched socket spoke first.

        Raises RankLost and HostGone. What a rank said last is heard before its death is judged.
        """
        ready = poll(self.poller, timeout_s)
        if self.socket in ready:
            return True
        if self.host_death_fd in ready:
            raise HostGone
        dead = [process for process in self.processes.values() if process.pidfd in ready]
        if not dead:
            return False
        if self.socket.poll(LAST_WORDS_MS):
            return True
        raise self._lost(min(dead, key=lambda process: process.wait(1.0) or 0))  # a signal before an exit code

    def refuse_word(self) -> None:
        """Take in what a rank says while nothing was asked: its Failure, or a breach of the protocol."""
        message = self._receive()
        if isinstance(message, Failure):
            raise self._cause(message)
        if message is not None:
            raise self._breach(message.rank, f"expected no word while the gang is idle, got {type(message).__name__}")

    def has_stopped_rank(self) -> bool:
        """Whether a signal has stopped one of them, as the kernel says."""
        return any(process.state() == STOPPED for process in self.processes.values())

    def end(self) -> None:
        """Tell the ranks to leave, then SIGTERM, then SIGKILL. Returns when none is left. Safe to call again."""
        end_processes(self.processes.values(), LEAVE_TIMEOUT_S)
        self.socket.close(linger=0)
        self._run_folder.remove_gang(self.number)

    def _receive(self) -> FromRank | None:
        """A rank's word; None for one of somebody else, who must be this user, and can do nothing with it."""
        identity, *frames = self.socket.recv_multipart()
        rank = self._identities.get(identity, -1)
        if rank < 0:
            log.warning("%s", event_line(self.run_id, "stranger", identity=identity[:64]))
            return None
        if len(frames) != 1:
            raise self._breach(rank, f"expected one frame, got {len(frames)}")
        try:
            message = decode(frames[0], FROM_RANK)
        except ProtocolError as error:
            raise self._breach(rank, str(error)) from None
        if message.rank != rank:
            raise self._breach(rank, f"it speaks as rank {message.rank}")
        self._journals[rank].note(f"{type(message).__name__.lower()}-heard", self.step)
        return message

    def _cause(self, failure: Failure) -> LeafsumError:
        """The error behind a rank's Failure.

        A broken exchange is told by the survivors: a death, or a peer's own failure, is its cause and outranks it.
        """
        deadline_s = time.monotonic() + CAUSE_TIMEOUT_S
        silent = {rank: process for rank, process in self.processes.items() if rank != failure.rank}
        while failure.transport and silent and (left_s := deadline_s - time.monotonic()) > 0:
            watched = zmq.Poller()
            for source in (self.socket, *(process.pidfd for process in silent.values())):
                watched.register(source, zmq.POLLIN)
            ready = poll(watched, left_s)
            if self.socket in ready:
                message = self._receive()
                if isinstance(message, Failure):
                    silent.pop(message.rank, None)
                    failure = failure if message.transport else message
                continue
            for rank, process in [each for each in silent.items() if each[1].pidfd in ready]:
                if process.wait(1.0) != LEFT_WITH_FAILURE:
                    return self._lost(process)
                del silent[rank]
        return self._failed(failure)

    def _failed(self, failure: Failure) -> LeafsumError:
        where = f"at step {failure.step}" if failure.step >= 0 else "while it started"
        text = f"rank {failure.rank} of {self.num_ranks} failed {where}: {failure.kind}: {failure.text}"
        if failure.kind == ModelError.__name__:
            return ModelError(text)
        if failure.kind == ConfigError.__name__:
            return ConfigError(text)
        return RankError(
            text,
            rank=failure.rank,
            step=failure.step,
            traceback_text=failure.traceback_text,
            events=merged_lines(self._journals[failure.rank].events, failure.events),
        )

    def _late(self, what: str, timeout_s: float, answers: Mapping[int, object]) -> DeadlineExceeded:
        """Ranks that wait for a hung peer are as silent as the peer: what the kernel says of each tells them apart."""
        late = [rank for rank in range(self.num_ranks) if rank not in answers]
        states = {rank: self.processes[rank].state() if rank in self.processes else NOT_THERE for rank in late}
        told = [f"{self._name(rank)} is {state}" for rank, state in states.items()]
        suspect = next((rank for rank in late if states[rank] != "sleeping"), late[0])
        return DeadlineExceeded(
            f"waited {timeout_s:g} s for {what}, {len(late)} of {self.num_ranks} ranks have not answered: "
            f"{'; '.join(told)}. A rank that is stopped or running hangs, sleeping ones wait for it",
            what=what,
            timeout_s=timeout_s,
            rank=suspect,
            step=self.step_under_way,
            events=merged_lines(self._journals[suspect].events),
        )

    def _lost(self, process: Process) -> RankLost:
        exit_status = process.wait(1.0)
        rank = next(rank for rank, each in self.processes.items() if each is process)
        return RankLost(
            f"{process.role} of {self.num_ranks} (pid {process.pid}) is gone {self._when()}: "
            f"{describe_exit(exit_status)}. {HINTS.get(exit_status, LAST_WORDS)}",
            role=process.role,
            exit_status=exit_status,
            rank=rank,
            step=self.step_under_way,
            events=merged_lines(self._journals[rank].events),
        )

    def _send_to(self, identity: bytes, frame: bytes) -> None:
        rank = self._identities[identity]
        try:
            self.socket.send_multipart([identity, frame])
        except zmq.ZMQError as error:
            process = self.processes[rank]
            if process.wait(CAUSE_TIMEOUT_S) is None:
                raise self._breach(rank, f"it is {process.state()} but cannot be reached: {error}") from error
            # it is gone: `collect`, which follows, hears its last words

    @property
    def step_under_way(self) -> int:
        """-1 where none is."""
        return self.step if self.is_under_way else -1

    def _breach(self, rank: int, text: str) -> ProtocolError:
        return ProtocolError(f"{self._name(rank)} {self._when()}: {text}", rank=rank)

    def _name(self, rank: int) -> str:
        process = self.processes.get(rank)
        return f"rank {rank}" if process is None else f"{process.role} (pid {process.pid})"

    def _when(self) -> str:
        if self.step < 0:
            return "before its first step"
        return f"at step {self.step}" if self.is_under_way else f"after step {self.step}"


NOT_THERE = "not there yet"

LAST_WORDS = "Its last words are on stderr above, if it had any"

HINTS: Mapping[int | None, str] = {
    -signal.SIGKILL: "Somebody has killed it, or the kernel for want of memory, of which the kernel's log tells",
    -signal.SIGBUS: "A model file may have been cut short while it was in use",
}
"""By exit status."""


def running_process(hello: Hello) -> Process:
    """The process of a rank that somebody else has started. Raises RankLost where there is none."""
    role = f"rank {hello.rank}"
    try:
        return Process(role, hello.pid)
    except OSError as error:
        raise RankLost(
            f"{role} said Hello as pid {hello.pid}, and no such process can be watched: {error.strerror}",
            role=role,
            exit_status=EXIT_UNKNOWN,
            rank=hello.rank,
        ) from None
