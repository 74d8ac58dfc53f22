"""The worker pool: what a program holds. A coordinator and its ranks do the work; the pool asks and waits."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..errors import ConfigError, LeafsumError, PromptError, ProtocolError
from ..ranks.checkpoint import Checkpoint
from ..ranks.sizes import expected_tensors
from ..ranks.spec import check_num_ranks, load_spec
from .conversation import Conversation
from .messages import Advance, Answer, AskWitness, Cancel, Finished, Order, Reconfigure, Start, Started
from .models import resolve_model
from .sampling import Completion, SamplingParams, token_sha256
from .scheduler import Limits
from .settings import Settings
from .tokenizer import Tokenizer
from .witness import Progress, Witness

Prompt = str | Sequence[int]

NOT_IDS = (bytes, bytearray, Mapping, Set)
"""What could be iterated as integers, and is not meant as token ids."""


@dataclass(slots=True)
class OpenRequest:
    """One request under way, on the pool's side."""

    prompt: str | None
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    output: list[int] = field(default_factory=list)
    finished: Finished | None = None


class WorkerPool:
    """One model on `tp` ranks. A context manager; `close()` (or leaving the block) ends every process it started.

        with WorkerPool(model="tiny", tp=2) as pool:
            completion, = pool.generate(["Once upon a time"], SamplingParams(max_tokens=32))

    Raises ConfigError and ModelError before any process exists, RankError, RankLost or DeadlineExceeded when the
    ranks do not come up. Calls from several threads take turns.
    """

    def __init__(self, settings: Settings | None = None, **fields: Any) -> None:
        if settings is not None and fields:
            raise ConfigError(f"expected settings or single fields, got both: {', '.join(sorted(fields))}")
        self.settings = Settings.resolve(fields, os.environ) if settings is None else settings
        self.model_dir = resolve_model(self.settings.model)
        self.spec = load_spec(self.model_dir)
        check_num_ranks(self.spec, self.settings.tp)
        checkpoint = Checkpoint.open(self.model_dir)
        checkpoint.check(expected_tensors(self.spec, checkpoint.entries))
        self.tokenizer = Tokenizer.open(self.model_dir)
        self.limits = Limits.of(self.settings, self.spec.max_context)
        self._next_request_id = 0
        self._is_running = False
        self._conversation = Conversation(self.settings.log_level)
        try:
            self._start(checkpoint.digest)
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

        A request that failed alone (its logits were not finite) has the finish_reason "failed" and says why in `error`.
        Raises PromptError where a prompt cannot be served (then none has run), and the gang's errors, after which the
        pool is closed.
        """
        requests = self._open_all(prompts, sampling)
        with self._conversation.turn:
            self._run(requests, on_progress)
        return [self._completion(index, request) for index, request in enumerate(requests)]

    def witness(self) -> Witness:
        """Counts that prove what ran. Asks the coordinator."""
        with self._conversation.turn:
            question = self._conversation.next_question()
            self._conversation.send(AskWitness(question=question))
            return Witness.of(self._conversation.answer(question, self.settings.step_timeout_s))

    def reconfigure(self, *, prefill_chunk: int, concurrency: int) -> None:
        """New scheduler limits for what is submitted next; they keep every bit. `concurrency` at most the started one.

        Raises ConfigError where requests are open or the value does not fit.
        """
        replace(self.settings, prefill_chunk=prefill_chunk, concurrency=concurrency)  # refuses wrong values
        with self._conversation.turn:
            question = self._conversation.next_question()
            self._conversation.send(
                Reconfigure(question=question, prefill_chunk=prefill_chunk, concurrency=concurrency)
            )
            answer = self._conversation.answer(question, self.settings.step_timeout_s)
        if answer.error:
            raise ConfigError(answer.error)

    def close(self) -> None:
        """End every process of this pool, within a bound, and remove its run folder. Safe to call again."""
        self._conversation.close()

    @property
    def run_id(self) -> str:
        return self._conversation.run_folder.run_id

    @property
    def run_folder(self) -> Path:
        return self._conversation.run_folder.path

    @property
    def coordinator_pid(self) -> int:
        """Raises PoolClosed once the pool is closed."""
        return self._conversation.require_open().pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, model_digest: str) -> None:
        self._conversation.send(
            Start(
                settings=self.settings.to_dict(),
                model_dir=str(self.model_dir),
                model_digest=model_digest,
                model_max_context=self.spec.max_context,
                num_layers=self.spec.num_layers,
            )
        )
        message = self._conversation.receive(self.settings.start_timeout_s)
        if not isinstance(message, Started):
            raise LeafsumError(f"expected Started, got {type(message).__name__}")

    def _run(self, requests: list[OpenRequest], on_progress: Callable[[Progress], None] | None) -> None:
        if self._is_running:
            raise ConfigError("generate was called from within its own on_progress; call it after it has returned")
        self._is_running = True
        try:
            self._run_alone(requests, on_progress)
        finally:
            self._is_running = False

    def _run_alone(self, requests: list[OpenRequest], on_progress: Callable[[Progress], None] | None) -> None:
        first_id = self._next_request_id
        self._next_request_id += len(requests)
        by_id = {first_id + index: request for index, request in enumerate(requests)}
        try:
            self._conversation.submit([self._order(request_id, request) for request_id, request in by_id.items()])
            self._follow(by_id, on_progress)
        except BaseException:
            self._cancel([request_id for request_id, request in by_id.items() if request.finished is None])
            raise

    def _open_all(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[OpenRequest]:
        if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
            raise ConfigError(f"expected a sequence of prompts, got {type(prompts).__name__}: put them in a list")
        per_prompt = sampling_of_each(sampling, len(prompts))
        return [
            self._open(index, prompt, params)
            for index, (prompt, params) in enumerate(zip(prompts, per_prompt, strict=True))
        ]

    def _open(self, index: int, prompt: Prompt, params: SamplingParams) -> OpenRequest:
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
        return OpenRequest(prompt if isinstance(prompt, str) else None, token_ids, params)

    def _token_ids(self, index: int, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise PromptError(f"prompt {index} is text, but {self.model_dir} has no tokenizer.json; give token ids")
            return tuple(self.tokenizer.encode(prompt))
        if isinstance(prompt, NOT_IDS):
            raise PromptError(f"prompt {index}: expected text, or a sequence of token ids, got {type(prompt).__name__}")
        try:
            ids = tuple(prompt)
            if any(isinstance(token_id, bool) for token_id in ids):
                raise TypeError("a truth value is no token id")
            return tuple(operator.index(token_id) for token_id in ids)  # numpy's integers are welcome, floats are not
        except TypeError as error:
            raise PromptError(f"prompt {index}: expected text, or a sequence of token ids: {error}") from None

    def _order(self, request_id: int, request: OpenRequest) -> Order:
        return Order(
            request_id=request_id,
            token_ids=request.prompt_ids,
            max_tokens=request.params.max_tokens,
            stop_ids=() if request.params.ignore_eos else self.spec.eos_ids,
        )

    def _follow(self, requests: dict[int, OpenRequest], on_progress: Callable[[Progress], None] | None) -> None:
        num_finished = num_prompt_tokens = num_output_tokens = 0
        while num_finished < len(requests):
            # Every step brings an Advance, so a silence longer than a step is a fault.
            message = self._conversation.receive(self.settings.step_timeout_s)
            if isinstance(message, Answer):
                continue  # to a question whose asker was interrupted
            if not isinstance(message, Advance | Finished):
                raise LeafsumError(f"expected progress of a request, got {type(message).__name__}")
            request = requests.get(message.request_id)
            if request is None:
                continue  # the last words of a request that was cancelled
            if isinstance(message, Finished):
                if message.num_output_tokens != len(request.output):
                    raise ProtocolError(
                        f"request {message.request_id} ended after {message.num_output_tokens} tokens, "
                        f"{len(request.output)} came: another process took part in the conversation"
                    )
                request.finished = message
                num_finished += 1
            else:
                request.output.extend(message.token_ids)
                num_prompt_tokens += message.num_prompt_rows
                num_output_tokens += len(message.token_ids)
            if on_progress is not None:
                on_progress(Progress(num_finished, len(requests), num_prompt_tokens, num_output_tokens))

    def _completion(self, index: int, request: OpenRequest) -> Completion:
        finished = request.finished
        assert finished is not None, "generate waits for every request"
        if finished.reason == "refused":
            raise PromptError(f"prompt {index}: {finished.error}")
        return Completion(
            prompt=request.prompt,
            prompt_token_ids=request.prompt_ids,
            token_ids=tuple(request.output),
            text=self.tokenizer.decode(request.output) if self.tokenizer else None,
            finish_reason=finished.reason,
            token_sha256=token_sha256(request.output),
            logits_sha256=(finished.reason != "failed" and finished.logits_sha256) or None,
            residual_hash="" if finished.reason == "failed" else f"{finished.residual_hash:016x}",
            tp=self.settings.tp,
            error=finished.error,
            layer_hashes=finished.layer_hashes,
        )

    def _cancel(self, request_ids: list[int]) -> None:
        if self._conversation.is_open and request_ids:
            self._conversation.send(Cancel(request_ids=tuple(request_ids)))


def sampling_of_each(sampling: object, num_prompts: int) -> Sequence[SamplingParams]:
    """One SamplingParams for all prompts, or one for each. Raises ConfigError for anything else."""
    if isinstance(sampling, SamplingParams):
        return [sampling] * num_prompts
    if not isinstance(sampling, Sequence) or not all(isinstance(each, SamplingParams) for each in sampling):
        raise ConfigError(f"expected SamplingParams, or a sequence of them, got {sampling!r}")
    if len(sampling) != num_prompts:
        raise ConfigError(f"expected sampling parameters for {num_prompts} prompts, got {len(sampling)}")
    return sampling
