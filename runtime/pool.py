"""The worker pool:

what a program holds. It starts a coordinator process and talks to it; all computing is elsewhere.
"""

from __future__ import annotations

import contextlib
import operator
import os
import shutil
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zmq

from .. import errors
from ..errors import (
    ConfigError,
    DeadlineExceeded,
    LeafsumError,
    PoolClosed,
    PromptError,
    RankError,
    RankLost,
    RequestFailed,
)
from ..ranks.checkpoint import Checkpoint
from ..ranks.control import open_socket, poll
from ..ranks.messages import decode, encode
from ..ranks.sizes import expected_tensors
from ..ranks.spec import check_num_ranks, load_spec
from .child import Child, describe_exit, end_children
from .messages import (
    FROM_COORDINATOR,
    Advance,
    Answer,
    AskWitness,
    Cancel,
    Fatal,
    Finished,
    FromCoordinator,
    Order,
    Reconfigure,
    Start,
    Started,
    Submit,
    ToCoordinator,
)
from .models import resolve_model
from .run_folder import RunFolder
from .sampling import Completion, SamplingParams, token_sha256
from .scheduler import Limits
from .settings import Settings
from .tokenizer import Tokenizer
from .witness import Progress, Witness

CLOSE_TIMEOUT_S = 15.0
"""How long the coordinator may take to end its ranks and leave; then SIGTERM, then SIGKILL. Its ranks die with it."""

START_GRACE_S = 90.0
"""What a start may take beyond `start_timeout_s`:

interpreters, and the coordinator's own deadlines, which come first.
"""

SUBMIT_TOKENS = 2**20
"""Prompt tokens in one message; the control plane carries six times as many."""

Prompt = str | Sequence[int]


@dataclass(slots=True)
class Open:
    """One request under way, on the pool's side."""

    prompt: str | None
    prompt_ids: tuple[int, ...]
    output: list[int] = field(default_factory=list)
    num_prompt_rows: int = 0
    finished: Finished | None = None


class WorkerPool:
    """One model on `tp` ranks. A context manager; `close()` (or leaving the block) ends every process it started.

        with WorkerPool(model="tiny", tp=2) as pool:
            completion, = pool.generate(["Once upon a time"], SamplingParams(max_tokens=32))

    Raises ConfigError and ModelError before any process exists, RankError, RankLost or DeadlineExceeded when the
    ranks do not come up. One thread at a time may use a pool.
    """

    def __init__(self, settings: Settings | None = None, **fields: Any) -> None:
        self.settings = Settings.resolve(fields, os.environ) if settings is None else settings
        if settings is not None and fields:
            raise ConfigError(f"expected settings or single fields, got both: {', '.join(sorted(fields))}")
        self.model_dir = resolve_model(self.settings.model)
        self.spec = load_spec(self.model_dir)
        check_num_ranks(self.spec, self.settings.tp)
        checkpoint = Checkpoint.open(self.model_dir)
        checkpoint.check(expected_tensors(self.spec, checkpoint.entries))
        self.tokenizer = Tokenizer.open(self.model_dir)
        self.limits = Limits.of(self.settings, self.spec.max_context)
        self._next_request_id = 0
        self._run_folder = RunFolder.make()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = open_socket(self._context, zmq.DEALER, self._run_folder.host_socket, bind=False)
        self._coordinator: Child | None = None
        self._finalizer = weakref.finalize(self, shutil.rmtree, self._run_folder.path, ignore_errors=True)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008 (frozen)
        *,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> list[Completion]:
        """Complete every prompt (text, or token ids), greedily; completions come in the order of the prompts.

        Raises PromptError where a prompt cannot be served (then none has run), RequestFailed where a request's logits
        were not finite, and the gang's errors, after which the pool is closed.
        """
        per_prompt = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(per_prompt) != len(prompts):
            raise ConfigError(f"expected sampling parameters for {len(prompts)} prompts, got {len(per_prompt)}")
        opens = [
            self._open(index, prompt, each)
            for index, (prompt, each) in enumerate(zip(prompts, per_prompt, strict=True))
        ]
        first_id = self._next_request_id
        self._next_request_id += len(opens)
        requests = {first_id + index: request for index, request in enumerate(opens)}
        try:
            orders = [
                self._order(request_id, request, params)
                for (request_id, request), params in zip(requests.items(), per_prompt, strict=True)
            ]
            for submit in submits(orders):
                self._send(submit)
            self._follow(requests, on_progress)
        except BaseException:
            self._cancel([request_id for request_id, request in requests.items() if request.finished is None])
            raise
        return [self._completion(index, request) for index, request in enumerate(opens)]

    def witness(self) -> Witness:
        """Counts that prove what ran. Asks the coordinator."""
        self._send(AskWitness())
        return Witness.of(self._expect(Answer, self.settings.step_timeout_s))

    def reconfigure(self, *, prefill_chunk: int, concurrency: int) -> None:
        """New scheduler limits for what is submitted next; they keep every bit. `concurrency` at most the started one.

        Raises ConfigError where requests are open or the value does not fit.
        """
        self._send(Reconfigure(prefill_chunk=prefill_chunk, concurrency=concurrency))
        answer = self._expect(Answer, self.settings.step_timeout_s)
        if answer.error:
            raise ConfigError(answer.error)

    def close(self) -> None:
        """End every process of this pool, within a bound, and remove its run folder. Safe to call again."""
        if self._coordinator is not None:
            end_children([self._coordinator], CLOSE_TIMEOUT_S)
            self._coordinator = None
        self._context.destroy(linger=0)
        self._finalizer()

    @property
    def run_id(self) -> str:
        return self._run_folder.run_id

    @property
    def run_folder(self) -> Path:
        return self._run_folder.path

    @property
    def coordinator_pid(self) -> int:
        """Raises PoolClosed once the pool is closed."""
        if self._coordinator is None:
            raise PoolClosed("this pool is closed; make a new one")
        return self._coordinator.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        arguments = ["--run-folder", str(self._run_folder.path), "--run-id", self._run_folder.run_id]
        arguments += ["--log-level", self.settings.log_level]
        self._coordinator = Child("coordinator", "leafsum.runtime.coordinator", arguments)
        start = Start(
            settings=self.settings.to_dict(),
            model_dir=str(self.model_dir),
            model_max_context=self.spec.max_context,
        )
        self._send(start)
        self.started = self._expect(Started, self.settings.start_timeout_s + START_GRACE_S)

    def _open(self, index: int, prompt: Prompt, params: SamplingParams) -> Open:
        token_ids = self._token_ids(index, prompt)
        for position, token_id in enumerate(token_ids):
            if not 0 <= token_id < self.spec.vocab_size:
                raise PromptError(
                    f"prompt {index}, position {position}: expected a token id of 0 to {self.spec.vocab_size - 1}, "
                    f"got {token_id}"
                )
        try:
            self.limits.check_fits(len(token_ids), params.max_tokens)
        except PromptError as error:
            raise PromptError(f"prompt {index}: {error}") from None
        return Open(prompt=prompt if isinstance(prompt, str) else None, prompt_ids=token_ids)

    def _token_ids(self, index: int, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise PromptError(f"prompt {index} is text, but {self.model_dir} has no tokenizer.json; give token ids")
            return tuple(self.tokenizer.encode(prompt))
        try:
            return tuple(
                operator.index(token_id) for token_id in prompt
            )  # numpy's integers are welcome, floats are not
        except TypeError as error:
            raise PromptError(f"prompt {index}: expected text, or a sequence of token ids: {error}") from None

    def _order(self, request_id: int, request: Open, params: SamplingParams) -> Order:
        stop_ids = () if params.ignore_eos else self.spec.eos_ids
        return Order(
            request_id=request_id, token_ids=request.prompt_ids, max_tokens=params.max_tokens, stop_ids=stop_ids
        )

    def _follow(self, requests: dict[int, Open], on_progress: Callable[[Progress], None] | None) -> None:
        num_unfinished = len(requests)
        while num_unfinished:
            message = self._receive(None)
            if not isinstance(message, Advance | Finished):
                raise LeafsumError(f"expected progress of a request, got {type(message).__name__}")
            request = requests.get(message.request_id)
            if request is None:
                continue  # the last words of a request that was cancelled
            if isinstance(message, Finished):
                request.finished = message
                num_unfinished -= 1
            else:
                request.num_prompt_rows += message.num_prompt_rows
                request.output.extend(message.token_ids)
            if on_progress is not None:
                on_progress(
                    Progress(
                        finished_prompts=len(requests) - num_unfinished,
                        total_prompts=len(requests),
                        prompt_tokens_done=sum(each.num_prompt_rows for each in requests.values()),
                        output_tokens=sum(len(each.output) for each in requests.values()),
                    )
                )

    def _completion(self, index: int, request: Open) -> Completion:
        finished = request.finished
        assert finished is not None, "generate waits for every request"
        if finished.reason == "refused":
            raise PromptError(f"prompt {index}: {finished.error}")
        if finished.reason == "failed":
            raise RequestFailed(f"prompt {index}: {finished.error}")
        return Completion(
            prompt=request.prompt,
            prompt_token_ids=request.prompt_ids,
            token_ids=tuple(request.output),
            text=self.tokenizer.decode(request.output) if self.tokenizer else None,
            finish_reason=finished.reason,
            token_sha256=token_sha256(request.output),
            logits_sha256=finished.logits_sha256 or None,
            residual_hash=f"{finished.residual_hash:016x}",
            tp=self.settings.tp,
        )

    def _cancel(self, request_ids: list[int]) -> None:
        if self._coordinator is not None and request_ids:
            with contextlib.suppress(LeafsumError, zmq.ZMQError):
                self._send(Cancel(request_ids=tuple(request_ids)))

    def _send(self, message: ToCoordinator) -> None:
        if self._coordinator is None:
            raise PoolClosed("this pool is closed; make a new one")
        self._socket.send(encode(message))

    def _expect(self, kind: type[Any], timeout_s: float) -> Any:
        while True:
            message = self._receive(timeout_s)
            if isinstance(message, kind):
                return message
            if not isinstance(message, Advance | Finished):
                raise LeafsumError(f"expected {kind.__name__}, got {type(message).__name__}")

    def _receive(self, timeout_s: float | None) -> FromCoordinator:
        """The coordinator's next word.

        Its Fatal, its death and the deadline are raised, after which the pool is closed.
        """
        coordinator = self._coordinator
        if coordinator is None:
            raise PoolClosed("this pool is closed; make a new one")
        poller = zmq.Poller()
        for source in (self._socket, coordinator.pidfd):
            poller.register(source, zmq.POLLIN)
        ready = poll(poller, timeout_s)
        if self._socket in ready:
            message = decode(self._socket.recv(), FROM_COORDINATOR)
            if isinstance(message, Fatal):
                self.close()
                raise error_of(message)
            return message
        exit_status = coordinator.exit_status()
        self.close()
        if ready:
            raise RankLost(
                f"the coordinator (pid {coordinator.pid}) is gone: {describe_exit(exit_status)}; "
                "its ranks ended with it",
                role="coordinator",
                exit_status=exit_status,
            )
        raise DeadlineExceeded(
            f"waited {timeout_s:g} s for the coordinator's answer; the pool is closed",
            what="coordinator",
            timeout_s=timeout_s or 0.0,
        )


def submits(orders: Sequence[Order]) -> Iterator[Submit]:
    """As few messages as carry the orders: each at most SUBMIT_TOKENS, or one order that has more."""
    batch: list[Order] = []
    num_tokens = 0
    for order in orders:
        if batch and num_tokens + len(order.token_ids) > SUBMIT_TOKENS:
            yield Submit(orders=tuple(batch))
            batch, num_tokens = [], 0
        batch.append(order)
        num_tokens += len(order.token_ids)
    if batch:
        yield Submit(orders=tuple(batch))


def error_of(fatal: Fatal) -> LeafsumError:
    """The error that a Fatal stands for, with the fields its class has."""
    kind: type[LeafsumError] = getattr(errors, fatal.kind, LeafsumError)
    if issubclass(kind, RankError):
        return kind(fatal.text, rank=fatal.rank, step=fatal.step, traceback_text=fatal.traceback_text)
    if issubclass(kind, RankLost):
        return kind(fatal.text, role=fatal.role, exit_status=fatal.exit_status)
    if issubclass(kind, DeadlineExceeded):
        return kind(fatal.text, what=fatal.what, timeout_s=fatal.timeout_s)
    error = kind(fatal.text)
    if fatal.traceback_text:
        error.add_note(fatal.traceback_text)
    return error
