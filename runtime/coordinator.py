"""The coordinator process: `python -m leafsum.runtime.coordinator`, started by a pool.

It alone decides: admission, batching, chunks, stops. One plan is under way at a time; a token is released to the pool
only after every rank came to the same result. It ends when its pool's death pipe closes, and takes all ranks with it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import setproctitle
import zmq

from ..errors import ConfigError, LeafsumError, ModelError, PromptError
from ..ranks.control import open_socket
from ..ranks.messages import PROTOCOL_VERSION, Hello, Plan, Ready, Setup, StepResult, Traffic, decode, encode
from .fatal import fatal_of
from .gang import Gang, HostGone, agreed, check_hellos, check_ready
from .messages import (
    TO_COORDINATOR,
    Advance,
    Answer,
    AskWitness,
    Cancel,
    Finished,
    FromCoordinator,
    Order,
    RankReport,
    Reconfigure,
    Start,
    Started,
    Submit,
    ToCoordinator,
)
from .open_request import no_stop_strings
from .run_folder import RunFolder
from .scheduler import Limits, Request, RequestStep, Scheduler
from .settings import Settings
from .stop_strings import StopFinder
from .tokenizer import Tokenizer

log = logging.getLogger("leafsum.coordinator")


RANK_GRACE_S = 30.0
"""How much longer ranks wait for one another than the coordinator for a step: it can name the one that hangs."""


class Coordinator:
    """One run: start, loop, and whatever ends it."""

    def __init__(self, run_folder: RunFolder, host_death_fd: int) -> None:
        self.run_folder = run_folder
        self.run_folder.hold()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.host = open_socket(self.context, zmq.PAIR, run_folder.host_socket, bind=True)
        self.host_death_fd = host_death_fd
        self.readies: list[Ready] = []
        self.traffic: dict[int, Traffic] = {}
        self.heard: deque[ToCoordinator] = deque()
        self.gang: Gang
        self.scheduler: Scheduler
        self.settings: Settings
        self.model_dir: Path
        self.tokenizer: Tokenizer | None = None
        """Opened for the first request that has stop strings."""

    def run(self) -> None:
        """Serve until the pool goes away or the gang fails; the pool hears why."""
        try:
            self.start(self._first_word())
            while True:
                self.obey()
                plan = self.scheduler.plan()
                if plan is None:
                    self._wait_for_host()
                else:
                    self.execute(plan)
        except HostGone:
            log.info("run %s: the pool is gone; the ranks end", self.run_folder.run_id)
        except Exception as error:
            log.info("run %s ends: %s: %s", self.run_folder.run_id, type(error).__name__, error)
            with contextlib.suppress(HostGone):
                self._tell_pool(fatal_of(error))
        finally:
            if hasattr(self, "gang"):
                self.gang.end()
            self.context.destroy()
            self.run_folder.remove()  # the pool does the same, unless it is dead

    def start(self, start: Start) -> None:
        """Spawn the ranks, set them up, and see that they are alike."""
        self.settings = settings = Settings.from_dict(start.settings)
        self.model_dir = Path(start.model_dir)
        limits = Limits.of(settings, start.model_max_context)
        self.scheduler = Scheduler(limits, start.num_layers)
        self.gang = Gang(self.context, self.run_folder, settings, self.host_death_fd)
        self.gang.spawn()
        deadline_s = time.monotonic() + settings.start_timeout_s
        hellos = self.gang.collect(Hello, "the first word", settings.start_timeout_s)
        check_hellos(hellos, self.run_folder.run_id)
        self.gang.send_setups([setup_of(settings, start, limits, self.run_folder, rank) for rank in range(settings.tp)])
        self.readies = self.gang.collect(Ready, "loading the model", deadline_s - time.monotonic())
        check_ready(self.readies, settings.digest(), start.model_digest)
        log.info("run %s: %d ranks are ready", self.run_folder.run_id, settings.tp)
        self._tell_pool(Started())

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
                    for request_id in message.request_ids:
                        if (request := self.scheduler.cancel(request_id)) is not None:
                            self._report(RequestStep(request, 0, (), "cancelled"))
                case Reconfigure():
                    self._tell_pool(self._answer(message.question, self._reconfigure(message)))
                case AskWitness():
                    self._tell_pool(self._answer(message.question, ""))
                case Start():
                    raise LeafsumError("expected one Start, got a second: a coordinator serves one pool, once")

    def execute(self, plan: Plan) -> None:
        """One step: every rank computes the plan, all must agree, then the pool hears of it."""
        self.gang.send_plan(plan)
        results = self.gang.collect(StepResult, f"step {plan.step}", self.settings.step_timeout_s)
        result = agreed(plan, results, self.run_folder.run_id)
        self.traffic = {each.rank: each.traffic for each in results}
        for done in self.scheduler.apply(plan, result.runs):
            self._report(done)

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
        self.tokenizer = self.tokenizer or Tokenizer.open(self.model_dir)
        if self.tokenizer is None:
            raise PromptError(f"stop: {no_stop_strings(self.model_dir)}")
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
                RankReport(rank=rank, pid=child.pid, ready=ready, traffic=self.traffic.get(rank, idle))
                for rank, (child, ready) in enumerate(zip(self.gang.children, self.readies, strict=True))
            ),
        )

    def _first_word(self) -> Start:
        poller = zmq.Poller()
        for source in (self.host, self.host_death_fd):
            poller.register(source, zmq.POLLIN)
        if self.host not in dict(poller.poll()):
            raise HostGone
        message = decode(self.host.recv(), TO_COORDINATOR)
        if not isinstance(message, Start):
            raise LeafsumError(f"expected Start as the pool's first word, got {type(message).__name__}")
        return message

    def _wait_for_host(self) -> None:
        """Idle: one poll over the pool's socket and everything that can go wrong meanwhile."""
        self.gang.poller.register(self.host, zmq.POLLIN)
        try:
            if self.gang.poll(None):
                self.gang.refuse_word()
        finally:
            self.gang.poller.unregister(self.host)

    def _listen(self) -> None:
        while self.host.poll(0):
            self.heard.append(decode(self.host.recv(), TO_COORDINATOR))

    def _tell_pool(self, message: FromCoordinator) -> None:
        """Raises HostGone where nobody listens any more: the binding end of a socket has no queue without a peer."""
        try:
            self.host.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise HostGone from None


def setup_of(settings: Settings, start: Start, limits: Limits, run_folder: RunFolder, rank: int) -> Setup:
    return Setup(
        protocol=PROTOCOL_VERSION,
        run_id=run_folder.run_id,
        rank=rank,
        num_ranks=settings.tp,
        model_dir=start.model_dir,
        device=settings.device,
        dtype=settings.dtype,
        exchange=settings.exchange,
        placement=settings.placement,
        page_size=settings.page_size,
        num_pages=limits.num_pages,
        num_slots=limits.num_slots,
        max_pages_per_slot=-(-limits.max_context // settings.page_size),
        num_threads=settings.threads or max(1, len(os.sched_getaffinity(0)) // settings.tp),
        transport=settings.transport,
        digests=settings.digests,
        layer_digests=settings.layer_digests,
        control=settings.control,
        poison=settings.poison,
        hazards=settings.hazards,
        delay_seed=settings.delay_seed,
        store_path=str(run_folder.store),
        start_timeout_s=settings.start_timeout_s,
        step_timeout_s=settings.step_timeout_s + RANK_GRACE_S,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="leafsum.runtime.coordinator", description="A coordinator; a pool starts it.")
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--log-level", default="warning")
    parser.add_argument("--death-fd", type=int, required=True)
    args = parser.parse_args()
    setproctitle.setproctitle(f"leafsum: coordinator {args.run_id}")
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        coordinator = Coordinator(RunFolder(args.run_folder, args.run_id), args.death_fd)
    except (OSError, ConfigError) as error:
        if args.run_folder.exists():
            sys.exit(f"leafsum: the coordinator cannot start: {error}")  # no socket, so the pool hears the exit code
        return  # the pool was closed before this process had started
    coordinator.run()


if __name__ == "__main__":
    main()
