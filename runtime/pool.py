"""The worker pool: what a program holds. A coordinator and its ranks do the work; the pool asks and waits."""

from __future__ import annotations

import itertools
import numbers
import operator
import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..errors import ConfigError, LeafsumError, PromptError
from ..ranks.checkpoint import Checkpoint
from ..ranks.configs.load import load_spec
from ..ranks.sizes import expected_tensors, ignored_prefixes
from ..ranks.spec import check_num_ranks
from .conversation import Conversation
from .limits import Limits
from .messages import Answer, AskWitness, Reconfigure, Start, Started
from .models import resolve_model
from .open_request import OpenRequest, no_stop_strings
from .recoveries import Recovery
from .sampling import Completion, SamplingParams
from .settings import Settings
from .stream import Stream
from .tokenizer import Tokenizer
from .witness import Progress, Witness

Prompt = str | Sequence[int]

NOT_IDS = (bytes, bytearray, Mapping, Set)
"""What could be iterated as integers, and is not meant as token ids."""


class WorkerPool:
    """One model on `tp` ranks. A context manager; `close()` (or leaving the block) ends every process it started.

        with WorkerPool(model="tiny", tp=2) as pool:
            completion, = pool.generate(["Once upon a time"], SamplingParams(max_tokens=32))

    Raises ConfigError and ModelError before any process exists, RankError, RankLost or DeadlineExceeded when the
    ranks do not come up. Calls and streams may be under way at once, in one thread or in several, or in an event loop:

        async with await asyncio.to_thread(WorkerPool, model="tiny", tp=2) as pool:
            (completion,) = await pool.stream("Once upon a time").aresult()

    There `generate`, `witness`, `reconfigure` and `close` are for `asyncio.to_thread`: they wait in their thread.
    A lost gang is started again and every request goes on (`recover`): see `recoveries`. The pool touches no signal
    handler. A forked copy of the program has no pool: its calls raise PoolClosed.
    """

    def __init__(self, settings: Settings | None = None, **fields: Any) -> None:
        if settings is not None and fields:
            raise ConfigError(f"expected settings or single fields, got both: {', '.join(sorted(fields))}")
        self.settings = Settings.resolve(fields, os.environ) if settings is None else settings
        self.model_dir = resolve_model(self.settings.model)
        self.spec = load_spec(self.model_dir)
        check_num_ranks(self.spec, self.settings.tp)
        checkpoint = Checkpoint.open(self.model_dir)
        checkpoint.check(expected_tensors(self.spec, checkpoint.entries), ignored_prefixes(self.spec))
        self.tokenizer = Tokenizer.open(self.model_dir)
        self.limits = Limits.of(self.settings, self.spec.max_context)
        self._request_ids = itertools.count()
        self._conversation = Conversation(self.settings.log_level, self.settings.queue_limit)
        try:
            self._start(checkpoint)
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
        Raises PromptError where a prompt cannot be served, QueueFull where the pool has no place free for one (then
        none has run), and the gang's errors, after which the pool is closed.
        """
        with self._stream(self._open_all(prompts, sampling)) as stream:
            return stream.result(on_progress)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008 (frozen)
    ) -> Stream:
        """The same as `generate`, to be read token by token: see `Stream`. One prompt may stand alone, without a list.

        Never waits: in an event loop too it is called as it is. Raises PromptError where a prompt cannot be served,
        QueueFull where the pool has no place free for one (then none runs).
        """
        return self._stream(self._open_all(as_prompts(prompts), sampling))

    def drain(self) -> None:
        """Requests that have not begun end now, as "cancelled"; those under way go on to their end. Never waits.

        What is submitted later is served as ever. Signal handlers may call it. Raises PoolClosed.
        """
        self._conversation.drain()

    @property
    def recoveries(self) -> tuple[Recovery, ...]:
        """The gangs that were lost, oldest first: at most the newest 64. Also of a pool that is closed."""
        return self._conversation.recoveries

    def witness(self) -> Witness:
        """Counts that prove what ran. Asks the coordinator."""
        return Witness.of(self._ask(lambda question: AskWitness(question=question)))

    def reconfigure(self, *, prefill_chunk: int, concurrency: int) -> None:
        """New scheduler limits for what is submitted next; they keep every bit. `concurrency` at most the started one.

        Raises ConfigError where requests are open or the value does not fit.
        """
        replace(self.settings, prefill_chunk=prefill_chunk, concurrency=concurrency)  # refuses wrong values
        answer = self._ask(
            lambda question: Reconfigure(question=question, prefill_chunk=prefill_chunk, concurrency=concurrency)
        )
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
        coordinator, _ = self._conversation.require_open()
        return coordinator.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from asyncio import to_thread  # slow to import, and a program with a loop has it

        await to_thread(self.close)

    def _start(self, checkpoint: Checkpoint) -> None:
        start = Start(
            settings=self.settings.to_dict(),
            model_dir=str(self.model_dir),
            model_digest=checkpoint.digest,
            model_stamp=checkpoint.stamp(),
            model_max_context=self.spec.max_context,
            num_layers=self.spec.num_layers,
        )
        answer = self._conversation.ask(lambda _: start, self.settings.start_timeout_s)
        if not isinstance(answer, Started):
            raise LeafsumError(f"expected Started, got {type(answer).__name__}")

    def _ask(self, question: Callable[[int], AskWitness | Reconfigure]) -> Answer:
        answer = self._conversation.ask(question, self.settings.step_timeout_s)
        if not isinstance(answer, Answer):
            raise LeafsumError(f"expected an Answer, got {type(answer).__name__}")
        return answer

    def _stream(self, requests: list[OpenRequest]) -> Stream:
        return Stream(
            self._conversation,
            self.tokenizer,
            requests,
            [request.order(self.spec.eos_ids) for request in requests],
            step_timeout_s=self.settings.step_timeout_s,
        )

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
        if params.stop_strings and self.tokenizer is None:
            raise PromptError(f"prompt {index}: stop: {no_stop_strings(self.model_dir)}")
        text = prompt if isinstance(prompt, str) else None
        return OpenRequest(index, next(self._request_ids), text, token_ids, params)

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


def as_prompts(prompts: Any) -> Sequence[Prompt]:
    """One prompt in a list, or what was given: a text, or a sequence that begins with an id, is one.

    An id is known by its type: arrays of ids have an __index__ too.
    """
    begins_with_id = isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], numbers.Integral)
    return [prompts] if isinstance(prompts, str) or begins_with_id else prompts


def sampling_of_each(sampling: object, num_prompts: int) -> Sequence[SamplingParams]:
    """One SamplingParams for all prompts, or one for each. Raises ConfigError for anything else."""
    if isinstance(sampling, SamplingParams):
        return [sampling] * num_prompts
    if not isinstance(sampling, Sequence) or not all(isinstance(each, SamplingParams) for each in sampling):
        raise ConfigError(f"expected SamplingParams, or a sequence of them, got {sampling!r}")
    if len(sampling) != num_prompts:
        raise ConfigError(f"expected sampling parameters for {num_prompts} prompts, got {len(sampling)}")
    return sampling
