"""The coordinator process: `python -m leafsum.runtime.coordinator`, started by a pool.

It alone decides: admission, batching, chunks, stops. One plan is under way at a time; a token is released to the pool
only after every rank came to the same result. A gang that is lost is started again, and fed the tokens so far. It ends
when its pool's death pipe closes, and takes all ranks with it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import setproctitle
import zmq

from ..errors import ConfigError, GangError, LeafsumError, ModelError, PromptError, ProtocolError
from ..ranks.control import open_socket, poll
from ..ranks.journal import event_line
from ..ranks.logs import configure_logs
from ..ranks.messages import Plan, StepResult, Traffic, decode, encode
from .agreement import agreed
from .fatal import fatal_of
from .gang import Gang, HostGone
from .gang_setup import GangFacts, setup_of
from .launcher import Launcher, Spawner
from .limits import Limits
from .messages import (
    TO_COORDINATOR,
    Advance,
    Answer,
    AskWitness,
    Cancel,
    CatchingUp,
    Drain,
    Finished,
    FromCoordinator,
    GangLost,
    GangRecovered,
    Order,
    RankReport,
    Reconfigure,
    Start,
    Started,
    Submit,
    ToCoordinator,
)
from .open_request import no_stop_strings
from .request import Request, RequestStep
from .restarts import Restarts, can_be_recovered, can_be_tried_again, count_oom_kills, is_from_outside
from .run_folder import RunFolder
from .scheduler import Scheduler
from .settings import Settings
from .stop_strings import StopFinder
from .tokenizer import Tokenizer

log = logging.getLogger("leafsum.coordinator")

KILLS_RANKS = "this request was computed alone when its ranks were lost, twice with the same rows; it is given up"

FIRST_WORD_TIMEOUT_S = 60.0
"""How long the pool may take for its first word; it speaks as soon as the line is up."""

ENDING_S = 30.0
"""The longest that a lost gang may take to end: its deadlines, one after the other, and a margin."""


class Coordinator:
    """One run: start, loop, recoveries, and whatever ends it."""

    def __init__(self, run_folder: RunFolder, host_death_fd: int, launcher: Launcher) -> None:
        self.run_folder = run_folder
        self.run_folder.hold()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.host = open_socket(self.context, zmq.PAIR, run_folder.host_socket, bind=True)
        self.host_death_fd = host_death_fd
        self.launcher = launcher
        self.traffic: dict[int, Traffic] = {}
        self.heard: deque[ToCoordinator] = deque()
        self._gang: Gang | None = None
        self.num_lost = 0
        """Gangs that were lost: the number of the next one."""
        self.num_oom_kills = 0
        self.first_word: Start
        self.limits: Limits
        self.scheduler: Scheduler
        self.restarts: Restarts
        self.settings: Settings
        self.tokenizer: Tokenizer | None = None
        """Opened for the first request that has stop strings."""

    def run(self) -> None:
        """Serve until the pool goes away or the gang fails for good; the pool hears why."""
        try:
            self.start(self._first_word())
            while True:
                self.obey()
                plan = self.scheduler.plan()
                try:
                    results = self._step(plan) if plan else self._wait_for_host()
                except (GangError, ProtocolError) as error:
                    self.recover(error, plan)
                else:
                    if plan:
                        self._release(plan, results)
        except HostGone:
            self._log("pool-gone")
        except Exception as error:
            self._log("fatal", kind=type(error).__name__, text=error)
            with contextlib.suppress(HostGone):
                self._tell_pool(fatal_of(error))
        finally:
            if self._gang is not None:
                self._gang.end()
            self.context.destroy()
            self.run_folder.remove()  # the pool does the same, unless it is dead

    @property
    def gang(self) -> Gang:
        """The one that serves, or was lost last: there is one as soon as `start` has begun."""
        assert self._gang is not None, "nothing is asked of ranks before they are started"
        return self._gang

    def start(self, start: Start) -> None:
        """Start the first gang. Whatever is wrong with it is the caller's to mend: there is nothing to recover yet."""
        self.first_word = start
        self.settings = settings = Settings.from_dict(start.settings)
        self.limits = Limits.of(settings, start.model_max_context)
        self.scheduler = Scheduler(self.limits, start.num_layers)
        self.restarts = Restarts(settings)
        self._start_gang(settings.tp)
        self._tell_pool(Started())

    def recover(self, error: LeafsumError, plan: Plan | None) -> None:
        """The gang is lost, with `plan` under way: another one takes its place, and every open request goes on.

        Raises `error` where that cannot or must not be, and the last gang's own where none came up.
        """
        begin_s = time.monotonic()
        if not (can_be_recovered(error) and self.launcher.can_launch_again):
            raise error
        by_its_rows = not is_from_outside(
            error,
            has_stopped_rank=self.gang.has_stopped_rank(),
            num_oom_kills=count_oom_kills() - self.num_oom_kills,
        )
        for num_ranks in self.restarts.sizes():
            self._tell_of_loss(error)
            self.gang.end()
            for request in self.scheduler.lose(plan, by_its_rows=by_its_rows):
                self.restarts.forgive(request.num_strikes)
                self._report(RequestStep(request, 0, (), "failed", f"{KILLS_RANKS}: {error}"))
            plan = None  # blamed once
            try:
                self._start_gang(num_ranks)
            except LeafsumError as again:
                if not can_be_tried_again(again, self.settings.recover):
                    raise
                error = again
            else:
                self._tell_of_recovery(time.monotonic() - begin_s)
                return
        error.args = (f"{error}{self.restarts.why_no_more()}",)
        raise error

    def _start_gang(self, num_ranks: int) -> None:
        settings, start = self.settings, self.first_word
        self.num_oom_kills = count_oom_kills()
        self.traffic = {}
        self.run_folder.restore()
        self._gang = gang = Gang(
            self.context, self.run_folder, self.launcher, self.host_death_fd, num_ranks=num_ranks, number=self.num_lost
        )
        facts = GangFacts(num_ranks, str(self.run_folder.store(gang.number)), self.scheduler.step)
        gang.start(
            [setup_of(settings, start, self.limits, gang.run_id, facts, rank) for rank in range(num_ranks)],
            settings_digest=settings.digest(),
            model_digest=start.model_digest,
            timeout_s=settings.start_timeout_s,
        )
        self._log("ready", gang=gang.number, tp=num_ranks)

    def _tell_of_loss(self, error: LeafsumError) -> None:
        self.num_lost += 1
        lost = GangLost(
            number=self.num_lost,
            cause=str(error),
            rank=error.rank if isinstance(error, GangError | ProtocolError) else -1,
            step=self.gang.step_under_way,
            num_open=self.scheduler.num_open,
            timeout_s=self.settings.start_timeout_s + ENDING_S,
        )
        self._log("gang-lost", lost.step, number=lost.number, cause=lost.cause)
        self._tell_pool(lost)

    def _tell_of_recovery(self, seconds: float) -> None:
        pids = tuple(self.gang.processes[rank].pid for rank in range(self.gang.num_ranks))
        number, num_ranks = self.num_lost, self.gang.num_ranks
        self._log("gang-recovered", number=number, tp=num_ranks, seconds=seconds)
        self._tell_pool(GangRecovered(number=number, num_ranks=num_ranks, pids=pids, seconds=seconds))

    def _log(self, name: str, step: int = -1, **facts: Any) -> None:
        log.info("%s", event_line(self.run_folder.run_id, name, step=step, **facts))

    def obey(self) -> None:
        """Act on all that the pool has said so far. Between steps only: a plan under way is never touched."""
        self._listen()
        while self.heard:
            message = self.heard.popleft()
            match message:
                case Submit():
                    for order in message.orders:
                        self._submit(order)
                case Cancel():
                    self._report_cancelled(self.scheduler.cancel(message.request_ids))
                case Drain():
                    self._report_cancelled(self.scheduler.drain())
                case Reconfigure():
                    self._tell_pool(self._answer(message.question, self._reconfigure(message)))
                case AskWitness():
                    self._tell_pool(self._answer(message.question, ""))
                case Start():
                    raise LeafsumError("expected one Start, got a second: a coordinator serves one pool, once")

    def _step(self, plan: Plan) -> list[StepResult]:
        """One step: every rank computes the plan."""
        self.gang.send_plan(plan)
        return self.gang.collect(StepResult, f"step {plan.step}", self.settings.step_timeout_s)

    def _release(self, plan: Plan, results: list[StepResult]) -> None:
        """All must agree; then the pool hears of it."""
        result = agreed(plan, results, self.run_folder.run_id)
        self.traffic = {each.rank: each.traffic for each in results}
        done = self.scheduler.apply(plan, result.runs)
        for each in done:
            self._report(each)
        if not any(each.is_news for each in done):
            self._tell_pool(CatchingUp(step=plan.step))

    def _report_cancelled(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._report(RequestStep(request, 0, (), "cancelled"))

    def _report(self, done: RequestStep) -> None:
        request = done.request
        if done.num_prompt_rows or done.token_ids:
            self._tell_pool(
                Advance(
                    request_id=request.request_id,
                    num_prompt_rows=done.num_prompt_rows,
                    token_ids=done.token_ids,
                )
            )
        if done.finish_reason:
            self._tell_pool(
                Finished(
                    request_id=request.request_id,
                    reason=done.finish_reason,
                    num_output_tokens=len(request.output),
                    residual_hash=request.residual_hash,
                    logits_sha256=request.logits_sha256,
                    layer_hashes=bytes(request.layer_hashes),
                    stop_string=request.stop_string,
                    error=done.error,
                    num_ranks=self.gang.num_ranks if request.has_begun else 0,
                    num_recoveries=request.num_recoveries,
                )
            )

    def _submit(self, order: Order) -> None:
        try:
            finder = self._stop_finder(order.stop_strings)
            stop_ids = frozenset(order.stop_ids)
            self.scheduler.submit(Request(order.request_id, order.token_ids, order.max_tokens, stop_ids, finder))
        except (PromptError, ModelError) as error:
            refusal = Finished(
                request_id=order.request_id,
                reason="refused",
                num_output_tokens=0,
                residual_hash=0,
                logits_sha256="",
                error=str(error),
            )
            self._tell_pool(refusal)

    def _stop_finder(self, stop_strings: tuple[str, ...]) -> StopFinder | None:
        if not stop_strings:
            return None
        model_dir = Path(self.first_word.model_dir)
        self.tokenizer = self.tokenizer or Tokenizer.open(model_dir)
        if self.tokenizer is None:
            raise PromptError(f"stop: {no_stop_strings(model_dir)}")
        return StopFinder(self.tokenizer, stop_strings)

    def _reconfigure(self, message: Reconfigure) -> str:
        if self.scheduler.num_open:
            return (
                f"expected an idle pool, {self.scheduler.num_open} requests are open; limits change between generations"
            )
        if not 1 <= message.concurrency <= self.scheduler.limits.num_slots:
            return (
                f"expected a concurrency of 1 to {self.scheduler.limits.num_slots} (what the pool was started with), "
                f"got {message.concurrency}"
            )
        self.scheduler.limits = replace(
            self.scheduler.limits, prefill_chunk=message.prefill_chunk, concurrency=message.concurrency
        )
        self.scheduler.most_rows = self.scheduler.most_live_requests = 0
        return ""

    def _answer(self, question: int, error: str) -> Answer:
        idle = Traffic(calls={}, bytes_sent=0, bytes_received=0, num_exchanges=0)
        return Answer(
            question=question,
            error=error,
            num_steps=self.scheduler.step,
            most_rows=self.scheduler.most_rows,
            most_live_requests=self.scheduler.most_live_requests,
            ranks=tuple(
                RankReport(
                    rank=ready.rank,
                    pid=self.gang.processes[ready.rank].pid,
                    ready=ready,
                    traffic=self.traffic.get(ready.rank, idle),
                )
                for ready in self.gang.readies
            ),
        )

    def _first_word(self) -> Start:
        poller = zmq.Poller()
        for source in (self.host, self.host_death_fd):
            poller.register(source, zmq.POLLIN)
        ready = poll(poller, FIRST_WORD_TIMEOUT_S)
        if self.host not in ready:
            raise HostGone
        message = decode(self.host.recv(), TO_COORDINATOR)
        if not isinstance(message, Start):
            raise LeafsumError(f"expected Start as the pool's first word, got {type(message).__name__}")
        return message

    def _wait_for_host(self) -> list[StepResult]:
        """Idle: one poll over the pool's socket and everything that can go wrong meanwhile; no result comes of it."""
        self.gang.poller.register(self.host, zmq.POLLIN)
        try:
            if self.gang.poll(None):
                self.gang.refuse_word()
        finally:
            self.gang.poller.unregister(self.host)
        return []

    def _listen(self) -> None:
        while self.host.poll(0):
            self.heard.append(decode(self.host.recv(), TO_COORDINATOR))

    def _tell_pool(self, message: FromCoordinator) -> None:
        """Raises HostGone where nobody listens any more: the binding end of a socket has no queue without a peer."""
        try:
            self.host.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise HostGone from None


def main() -> None:
    parser = argparse.ArgumentParser(prog="leafsum.runtime.coordinator", description="A coordinator; a pool starts it.")
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--log-level", default="warning")
    parser.add_argument("--death-fd", type=int, required=True)
    args = parser.parse_args()
    setproctitle.setproctitle(f"leafsum: coordinator {args.run_id}")
    configure_logs(args.log_level, args.run_id)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a program that ignores it hands that on, and exit codes are lost
    try:
        coordinator = Coordinator(
            RunFolder(args.run_folder, args.run_id),
            args.death_fd,
            Spawner(args.run_id, args.log_level, args.death_fd),
        )
    except (OSError, ConfigError) as error:
        if args.run_folder.exists():
            sys.exit(f"leafsum: the coordinator cannot start: {error}")  # no socket, so the pool hears the exit code
        return  # the pool was closed before this process had started
    coordinator.run()


if __name__ == "__main__":
    main()
