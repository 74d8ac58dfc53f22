"""The gang: the rank processes of one run, their control socket, and the rule that all answer alike or none goes on."""

from __future__ import annotations

import os
import select
import time
from typing import NoReturn, TypeVar

import zmq

from ..errors import DeadlineExceeded, LeafsumError, ProtocolError, RankError, RankLost, RankMismatch
from ..ranks.control import open_socket, poll, rank_identity
from ..ranks.messages import (
    FROM_RANK,
    PROTOCOL_VERSION,
    Failure,
    FromRank,
    Hello,
    Plan,
    Ready,
    Setup,
    StepResult,
    ToRank,
    decode,
    encode,
)
from .child import Child, describe_exit, end_children
from .run_folder import RunFolder

LEAVE_TIMEOUT_S = 3.0
"""How long ranks may take to leave once their death pipes are closed; then SIGTERM."""

CAUSE_TIMEOUT_S = 2.0
"""After a rank reports a broken exchange: how long to look for the rank whose death broke it."""

A = TypeVar("A", Hello, Ready, StepResult)


class HostGone(Exception):
    """The program that owns this coordinator has closed its pool, or is dead."""


class Gang:
    """The ranks of one run.

    `collect` is the only wait for them: every answer, a death and a deadline end in it alike.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], run_folder: RunFolder, num_ranks: int, host_death_fd: int
    ) -> None:
        self.num_ranks = num_ranks
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
        """Start every rank process; liveness is registered before the first of them does anything slow."""
        for rank in range(self.num_ranks):
            arguments = ["--run-folder", str(self._run_folder.path), "--run-id", self.run_id, "--rank", str(rank)]
            arguments += ["--tp", str(self.num_ranks), "--parent-pid", str(os.getpid())]
            child = Child(f"rank {rank}", "leafsum.ranks.worker", arguments, env=rank_environment())
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
            ready = self.poll(deadline_s - time.monotonic())
            if not ready:
                missing = ", ".join(str(rank) for rank in range(self.num_ranks) if rank not in answers)
                raise DeadlineExceeded(
                    f"waited {timeout_s:g} s for {what} of rank {missing} (of {self.num_ranks}); nothing came",
                    what=what,
                    timeout_s=timeout_s,
                )
            answer = self._receive(kind, answers)
            answers[answer.rank] = answer
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
        for child in self.children:
            if child.pidfd in ready:
                raise self._lost(child, child.wait(1.0))
        return False

    def refuse_word(self) -> NoReturn:
        """Take in what a rank says while nothing was asked: its Failure, or a breach of the protocol."""
        identity, frame = self.socket.recv_multipart()
        message = decode(frame, FROM_RANK)
        if isinstance(message, Failure):
            raise self._failure(message)
        raise ProtocolError(f"expected no word of {identity!r} while the gang is idle, got {type(message).__name__}")

    def end(self) -> None:
        """Tell the ranks to leave, then SIGTERM, then SIGKILL. Returns when none is left. Safe to call again."""
        end_children(self.children, LEAVE_TIMEOUT_S)

    def _receive(self, kind: type[A], answers: dict[int, A]) -> A:
        identity, frame = self.socket.recv_multipart()
        if identity not in self._identities:
            raise ProtocolError(f"expected a rank of run {self.run_id}, got a message from {identity!r}")
        rank = self._identities[identity]
        message: FromRank = decode(frame, FROM_RANK)
        if isinstance(message, Failure):
            raise self._failure(message)
        if not isinstance(message, kind) or message.rank != rank or rank in answers:
            raise ProtocolError(
                f"expected one {kind.__name__} of rank {rank}, got {type(message).__name__} of {message.rank}"
            )
        return message

    def _failure(self, failure: Failure) -> LeafsumError:
        """The error that a rank's Failure stands for.

        A broken exchange is told by survivors: the death is the cause.
        """
        if failure.transport and (cause := self._first_dead(besides=failure.rank)):
            return self._lost(cause, cause.wait(1.0))
        where = f"at step {failure.step}" if failure.step >= 0 else "while it started"
        return RankError(
            f"rank {failure.rank} of {self.num_ranks} failed {where}: {failure.kind}: {failure.text}",
            rank=failure.rank,
            step=failure.step,
            traceback_text=failure.traceback_text,
        )

    def _first_dead(self, besides: int) -> Child | None:
        """A rank that died of itself. One that left with a Failure of its own (exit code 1) is no cause."""
        others = [child for rank, child in enumerate(self.children) if rank != besides]
        deadline_s = time.monotonic() + CAUSE_TIMEOUT_S
        while others:
            ready, _, _ = select.select([child.pidfd for child in others], [], [], deadline_s - time.monotonic())
            for child in [child for child in others if child.pidfd in ready]:
                if child.wait(1.0) != 1:
                    return child
                others.remove(child)
            if not ready or time.monotonic() >= deadline_s:
                break
        return None

    def _lost(self, child: Child, exit_status: int | None) -> RankLost:
        where = f"at step {self.step}" if self.step >= 0 else "before the first step"
        return RankLost(
            f"{child.role} of {self.num_ranks} (pid {child.pid}) is gone {where}: {describe_exit(exit_status)}. "
            "Its last words are on stderr above, if it had any; the kernel's log tells of an out-of-memory kill",
            role=child.role,
            exit_status=exit_status,
        )

    def _send_to(self, identity: bytes, frame: bytes) -> None:
        try:
            self.socket.send_multipart([identity, frame])
        except zmq.ZMQError as error:
            rank = self._identities[identity]
            exit_status = self.children[rank].wait(1.0)
            if exit_status is None:
                raise ProtocolError(f"rank {rank} is alive but cannot be reached: {error}") from error
            raise self._lost(self.children[rank], exit_status) from error


def rank_environment() -> dict[str, str]:
    """A rank inherits this process's environment; its libraries' own thread pools stay out of the way of the
    kernels'.
    """
    return {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def agreed(results: list[StepResult], run_id: str) -> StepResult:
    """The one result that all ranks came to. Raises RankMismatch that names the first difference."""
    first = results[0]
    for other in results[1:]:
        for mine, theirs in zip(first.runs, other.runs, strict=False):
            if mine != theirs:
                raise RankMismatch(
                    f"run {run_id}: ranks disagree at step {first.step}, slot {mine.slot}: rank {first.rank} has token "
                    f"{mine.token_id}, residual {mine.residual_hash:016x}; rank {other.rank} has token "
                    f"{theirs.token_id}, residual {theirs.residual_hash:016x}. No token of this step was released",
                    rank=other.rank,
                    step=first.step,
                )
        if other.step != first.step or len(other.runs) != len(first.runs):
            raise RankMismatch(
                f"rank {other.rank} answered step {other.step} with {len(other.runs)} runs, "
                f"rank {first.rank} step {first.step} with {len(first.runs)}",
                rank=other.rank,
                step=first.step,
            )
    return first


def check_hellos(hellos: list[Hello], run_id: str) -> None:
    for hello in hellos:
        if hello.protocol != PROTOCOL_VERSION or hello.run_id != run_id:
            raise ProtocolError(
                f"expected rank {hello.rank} of run {run_id} at protocol {PROTOCOL_VERSION}, got run {hello.run_id} at "
                f"protocol {hello.protocol}"
            )


def check_ready(readies: list[Ready], settings_digest: str) -> None:
    """All ranks read the same model with the same settings, before the first step.

    Raises RankMismatch with both sides.
    """
    first = readies[0]
    for ready in readies:
        for name, mine, theirs in (
            ("model digest", first.model_digest, ready.model_digest),
            ("settings digest", settings_digest, ready.settings_digest),
            ("exchange", first.exchange, ready.exchange),
            ("versions", str(first.versions), str(ready.versions)),
        ):
            if mine != theirs:
                raise RankMismatch(
                    f"ranks disagree before the first step about the {name}: rank {first.rank} has {mine}, "
                    f"rank {ready.rank} has {theirs}",
                    rank=ready.rank,
                    step=-1,
                )
