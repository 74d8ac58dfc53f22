"""The gang: the rank processes of one run, their control socket, and the rule that all answer alike or none goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import NoReturn, TypeVar

import zmq

from ..errors import (
    ConfigError,
    DeadlineExceeded,
    LeafsumError,
    ModelError,
    ProtocolError,
    RankError,
    RankLost,
    RankMismatch,
)
from ..ranks.control import open_socket, poll, rank_identity
from ..ranks.messages import (
    FROM_RANK,
    LEFT_WITH_FAILURE,
    PROTOCOL_VERSION,
    Failure,
    FromRank,
    Hello,
    Plan,
    Ready,
    RunResult,
    Setup,
    StepResult,
    ToRank,
    decode,
    encode,
)
from .child import Child, describe_exit, end_children
from .layer_hashes import first_difference, num_layers_of
from .run_folder import RunFolder
from .settings import Settings

LEAVE_TIMEOUT_S = 3.0
"""How long ranks may take to leave once their death pipes are closed; then SIGTERM."""

CAUSE_TIMEOUT_S = 2.0
"""After a rank reports a broken exchange: how long to look for the rank that broke it."""

LAST_WORDS_MS = 200
"""A death can be seen before the last message of the dead: how long to look for one."""

A = TypeVar("A", Hello, Ready, StepResult)


class HostGone(Exception):
    """The program that owns this coordinator has closed its pool, or is dead."""


class Gang:
    """The ranks of one run.

    `collect` is the only wait for them: every answer, a death and a deadline end in it alike.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], run_folder: RunFolder, settings: Settings, host_death_fd: int
    ) -> None:
        self.num_ranks = num_ranks = settings.tp
        self._log_level = settings.log_level
        self.run_id = run_folder.run_id
        self.step = -1
        self.children: list[Child] = []
        self.poller = zmq.Poller()
        self.socket = open_socket(context, zmq.ROUTER, run_folder.ranks_socket, bind=True)
        self.host_death_fd = host_death_fd
        for source in (self.socket, host_death_fd):
            self.poller.register(source, zmq.POLLIN)
        self._identities = {rank_identity(run_folder.run_id, rank): rank for rank in range(num_ranks)}
        self._run_folder = run_folder

    def spawn(self) -> None:
        """Start every rank process; liveness is registered before the first of them does anything slow.

        A rank also watches the program's death pipe: a coordinator that is stopped cannot pass its end on.
        """
        for rank in range(self.num_ranks):
            arguments = ["--run-folder", str(self._run_folder.path), "--run-id", self.run_id, "--rank", str(rank)]
            arguments += ["--tp", str(self.num_ranks), "--parent-pid", str(os.getpid()), "--log-level", self._log_level]
            try:
                child = Child(f"rank {rank}", "leafsum.ranks.worker", arguments, rank_environment(), self.host_death_fd)
            except OSError as error:
                raise LeafsumError(
                    f"cannot start rank {rank} of {self.num_ranks}: {error.strerror}. Look at the limits of processes "
                    "and open files (ulimit -u, ulimit -n), and at free memory"
                ) from error
            self.children.append(child)
            self.poller.register(child.pidfd, zmq.POLLIN)

    def send(self, message: ToRank) -> None:
        """Send the same message to every rank."""
        frame = encode(message)
        for identity in self._identities:
            self._send_to(identity, frame)

    def send_setups(self, setups: list[Setup]) -> None:
        for identity, setup in zip(self._identities, setups, strict=True):
            self._send_to(identity, encode(setup))

    def send_plan(self, plan: Plan) -> None:
        self.step = plan.step
        self.send(plan)

    def collect(self, kind: type[A], what: str, timeout_s: float) -> list[A]:
        """One answer of `kind` from every rank, in rank order.

        Raises RankError (a rank reported an exception), RankLost (it died), DeadlineExceeded, ProtocolError, HostGone.
        """
        answers: dict[int, A] = {}
        deadline_s = time.monotonic() + timeout_s
        while len(answers) < self.num_ranks:
            if not self.poll(deadline_s - time.monotonic()):
                raise self._late(what, timeout_s, answers)
            rank, message = self._receive()
            if isinstance(message, Failure):
                raise self._cause(message)
            if not isinstance(message, kind) or rank in answers:
                raise ProtocolError(
                    f"expected one {kind.__name__} of each rank, got {type(message).__name__} of rank {rank}"
                )
            answers[rank] = message
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
        dead = [child for child in self.children if child.pidfd in ready]
        if not dead:
            return False
        if self.socket.poll(LAST_WORDS_MS):
            return True
        raise self._lost(min(dead, key=lambda child: child.wait(1.0) or 0))  # a signal before an exit code

    def refuse_word(self) -> NoReturn:
        """Take in what a rank says while nothing was asked: its Failure, or a breach of the protocol."""
        rank, message = self._receive()
        if isinstance(message, Failure):
            raise self._cause(message)
        raise ProtocolError(f"expected no word of rank {rank} while the gang is idle, got {type(message).__name__}")

    def end(self) -> None:
        """Tell the ranks to leave, then SIGTERM, then SIGKILL. Returns when none is left. Safe to call again."""
        end_children(self.children, LEAVE_TIMEOUT_S)

    def _receive(self) -> tuple[int, FromRank]:
        identity, *frames = self.socket.recv_multipart()
        if identity not in self._identities:
            raise ProtocolError(f"expected a rank of run {self.run_id}, got a message from {identity!r}")
        if len(frames) != 1:
            raise ProtocolError(f"rank {self._identities[identity]}: expected one frame, got {len(frames)}")
        try:
            message = decode(frames[0], FROM_RANK)
        except ProtocolError as error:
            raise ProtocolError(f"rank {self._identities[identity]}: {error}") from None
        if message.rank != self._identities[identity]:
            raise ProtocolError(f"rank {self._identities[identity]} speaks as rank {message.rank}")
        return message.rank, message

    def _cause(self, failure: Failure) -> LeafsumError:
        """The error behind a rank's Failure.

        A broken exchange is told by the survivors: a death, or a peer's own failure, is its cause and outranks it.
        """
        deadline_s = time.monotonic() + CAUSE_TIMEOUT_S
        silent = {rank: child for rank, child in enumerate(self.children) if rank != failure.rank}
        while failure.transport and silent and (left_s := deadline_s - time.monotonic()) > 0:
            watched = zmq.Poller()
            for source in (self.socket, *(child.pidfd for child in silent.values())):
                watched.register(source, zmq.POLLIN)
            ready = poll(watched, left_s)
            if self.socket in ready:
                rank, message = self._receive()
                if isinstance(message, Failure):
                    silent.pop(rank, None)
                    failure = failure if message.transport else message
                continue
            for rank, child in [(rank, child) for rank, child in silent.items() if child.pidfd in ready]:
                if child.wait(1.0) != LEFT_WITH_FAILURE:
                    return self._lost(child)
                del silent[rank]
        return self._failed(failure)

    def _failed(self, failure: Failure) -> LeafsumError:
        where = f"at step {failure.step}" if failure.step >= 0 else "while it started"
        text = f"rank {failure.rank} of {self.num_ranks} failed {where}: {failure.kind}: {failure.text}"
        if failure.kind == ModelError.__name__:
            return ModelError(text)
        if failure.kind == ConfigError.__name__:
            return ConfigError(text)
        return RankError(text, rank=failure.rank, step=failure.step, traceback_text=failure.traceback_text)

    def _late(self, what: str, timeout_s: float, answers: Mapping[int, object]) -> DeadlineExceeded:
        """Ranks that wait for a hung peer are as silent as the peer: what the kernel says of each tells them apart."""
        silent = [
            f"{child.role} (pid {child.pid}) is {child.state()}"
            for rank, child in enumerate(self.children)
            if rank not in answers
        ]
        return DeadlineExceeded(
            f"waited {timeout_s:g} s for {what}, {len(silent)} of {self.num_ranks} ranks have not answered: "
            f"{'; '.join(silent)}. A rank that is stopped or running hangs, sleeping ones wait for it",
            what=what,
            timeout_s=timeout_s,
        )

    def _lost(self, child: Child) -> RankLost:
        exit_status = child.wait(1.0)
        where = f"at step {self.step}" if self.step >= 0 else "before the first step"
        return RankLost(
            f"{child.role} of {self.num_ranks} (pid {child.pid}) is gone {where}: {describe_exit(exit_status)}. "
            "Its last words are on stderr above, if it had any; the kernel's log tells of an out-of-memory kill, and a "
            "bus error of a model file that was cut short while it was in use",
            role=child.role,
            exit_status=exit_status,
        )

    def _send_to(self, identity: bytes, frame: bytes) -> None:
        child = self.children[self._identities[identity]]
        try:
            self.socket.send_multipart([identity, frame])
        except zmq.ZMQError as error:
            if child.wait(1.0) is None:
                raise ProtocolError(f"{child.role} is {child.state()} but cannot be reached: {error}") from error
            raise self._lost(child) from error


def rank_environment() -> dict[str, str]:
    """A rank inherits this process's environment; its libraries' own thread pools stay out of the way of the
    kernels'.
    """
    return {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def agreed(plan: Plan, results: list[StepResult], run_id: str) -> StepResult:
    """The one result that all ranks came to. Raises RankMismatch that names the first difference."""
    for result in results:
        slots = [run.slot for run in result.runs]
        if result.step != plan.step or slots != [run.slot for run in plan.runs]:
            raise RankMismatch(
                f"run {run_id}: rank {result.rank} answered step {plan.step} as step {result.step} with slots {slots}; "
                f"the plan has slots {[run.slot for run in plan.runs]}",
                rank=result.rank,
                step=plan.step,
            )
    first = results[0]
    for other in results[1:]:
        for mine, theirs in zip(first.runs, other.runs, strict=True):
            if mine != theirs:
                raise RankMismatch(
                    f"run {run_id}: ranks disagree at step {plan.step}, slot {mine.slot}"
                    f"{_where_layers_differ(mine, theirs, plan)}: rank {first.rank} has token "
                    f"{mine.token_id}, residual {mine.residual_hash:016x}; rank {other.rank} has token "
                    f"{theirs.token_id}, residual {theirs.residual_hash:016x}. No token of this step was released",
                    rank=other.rank,
                    step=plan.step,
                )
    return first


def _where_layers_differ(mine: RunResult, theirs: RunResult, plan: Plan) -> str:
    """', position P, layer L': the first layer of the first row that differs; empty without layer hashes."""
    run = next(run for run in plan.runs if run.slot == mine.slot)
    num_layers = num_layers_of(mine.layer_hashes, len(run.token_ids))
    place = first_difference(mine.layer_hashes, theirs.layer_hashes, num_layers)
    if place is None:
        return ""
    row, layer = place
    return f", position {run.start + row}, layer {layer}"


def check_hellos(hellos: list[Hello], run_id: str) -> None:
    for hello in hellos:
        if hello.protocol != PROTOCOL_VERSION or hello.run_id != run_id:
            raise ProtocolError(
                f"expected rank {hello.rank} of run {run_id} at protocol {PROTOCOL_VERSION}, got run {hello.run_id} at "
                f"protocol {hello.protocol}"
            )


def check_ready(readies: list[Ready], settings_digest: str, model_digest: str) -> None:
    """All ranks read the model that the pool read, with its settings. Raises RankMismatch with both sides."""
    first = readies[0]
    for ready in readies:
        for name, expected, found in (
            ("model digest", model_digest, ready.model_digest),
            ("settings digest", settings_digest, ready.settings_digest),
            ("exchange", first.exchange, ready.exchange),
            ("transport", first.transport, ready.transport),
            ("number of threads", str(first.num_threads), str(ready.num_threads)),
            ("poison", str(first.poison), str(ready.poison)),
            ("versions", str(first.versions), str(ready.versions)),
        ):
            if expected != found:
                raise RankMismatch(
                    f"before the first step, rank {ready.rank} has another {name}: expected {expected}, got {found}",
                    rank=ready.rank,
                    step=-1,
                )
