"""A stream: prompts under way, read token by token or all at once, and cancelled when nobody wants the rest."""

from __future__ import annotations

import numbers
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from ..errors import ConfigError, LeafsumError, ModelError
from .admission import Batch
from .conversation import Conversation
from .detokenizer import Detokenizer
from .inbox import Inbox
from .messages import Advance, Answer, Finished, Order, Started
from .open_request import OpenRequest
from .sampling import Completion
from .stop_strings import Beginnings, first_stop
from .tokenizer import Tokenizer
from .witness import Progress


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step brought to one prompt: a token, and the text that is certain with it.

    Text that a later token may change, or that may become a stop string, comes with a later delta: all texts of a
    prompt together are its completion's. `text` is None for a model folder without a tokenizer. The last delta of a
    prompt has no token but the `completion`, which is None in the others.
    """

    prompt_index: int
    token_ids: tuple[int, ...]
    text: str | None
    completion: Completion | None = None


class Stream:
    """Prompts under way, opened by `WorkerPool.stream`: an iterator over their deltas, and a context manager.

        with pool.stream("Once upon a time") as stream:
            for delta in stream:
                print(delta.text, end="", flush=True)
        (completion,) = stream.result()

    In a task of an event loop the same with `async with`, `async for` and `await stream.aresult()`: the loop goes on
    while it waits.

    A stream that is not read holds up no other. Leaving the block cancels what is left of it, and so does an exception
    that comes out of it, a task's cancellation too, or dropping it. One thread or task at a time reads, a second is
    refused; `cancel` and `close` are for any. Reading raises the gang's errors, after which the pool is closed. A gang
    that is lost and started again is a pause.

    Of more prompts than the pool has places for (`queue_limit`) the rest waits here: one is submitted when another has
    ended and its last delta was read.
    """

    def __init__(
        self,
        conversation: Conversation,
        tokenizer: Tokenizer | None,
        requests: Sequence[OpenRequest],
        orders: Sequence[Order],
        *,
        step_timeout_s: float,
    ) -> None:
        self._conversation = conversation
        self._tokenizer = tokenizer
        self._step_timeout_s = step_timeout_s
        self._requests = {request.request_id: request for request in requests}
        self._texts: dict[int, _CertainText] = {}
        self._completions: dict[int, Completion] = {}
        self._num_prompt_tokens = self._num_output_tokens = 0
        self._inbox = Inbox()
        self._reader = threading.Lock()
        self._open = {request.request_id: request.index for request in requests}
        """Those that go on."""
        self._batch = Batch(self._inbox)
        self._give_up = weakref.finalize(self, conversation.give_up, self._batch)
        self._give_up.atexit = False  # the program's end is the pool's
        try:
            conversation.submit(orders, self._batch)
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        while (word := self._hear()) is not None:
            if isinstance(word, Finished) or word.token_ids:
                return self._delta(word)
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while (word := await self._ahear()) is not None:
            if isinstance(word, Finished) or word.token_ids:
                return self._delta(word)
        raise StopAsyncIteration

    def result(self, on_progress: Callable[[Progress], None] | None = None) -> list[Completion]:
        """Wait for what is left; the completions of all prompts, in their order. A stream that was read to its end has
        them also after its block.

        Raises ConfigError where the stream was closed before.
        """
        while self._hear() is not None:
            if on_progress is not None:
                on_progress(self._progress())
        return self._all_completions()

    async def aresult(self, on_progress: Callable[[Progress], None] | None = None) -> list[Completion]:
        """As `result`, for a task."""
        while await self._ahear() is not None:
            if on_progress is not None:
                on_progress(self._progress())
        return self._all_completions()

    def cancel(self, prompt_index: int | None = None) -> None:
        """End one prompt, or all, as they are; those that have ended stay as they are.

        Read on: a cancelled prompt comes to a completion with finish_reason "cancelled". It may have tokens that were
        not read when this was called. Raises ConfigError for an index that no prompt has.
        """
        found: object = prompt_index
        is_index = not isinstance(found, bool) and isinstance(found, numbers.Integral)
        if prompt_index is not None and not (is_index and prompt_index in range(len(self._requests))):
            raise ConfigError(f"expected a prompt index of 0 to {len(self._requests) - 1}, got {prompt_index!r}")
        chosen = [key for key, index in [*self._open.items()] if prompt_index in (None, index)]
        self._conversation.cancel(self._batch, chosen)

    def close(self) -> None:
        """Cancel what is left, and read no more. Safe to call again."""
        self._give_up()
        self._inbox.put(None)

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
        self.close()

    def _hear(self) -> Advance | Finished | None:
        """Take the next word in; None at the end. Whatever is raised here, Ctrl-C too, ends the stream."""
        if not self._begin_to_read():
            return None
        try:
            return self._take(self._conversation.receive(self._inbox, self._step_timeout_s))
        except BaseException:
            self.close()
            raise
        finally:
            self._reader.release()

    async def _ahear(self) -> Advance | Finished | None:
        """As `_hear`; the cancellation of the task that waits is raised here, too."""
        if not self._begin_to_read():
            return None
        try:
            return self._take(await self._conversation.areceive(self._inbox, self._step_timeout_s))
        except BaseException:
            self.close()
            raise
        finally:
            self._reader.release()

    def _begin_to_read(self) -> bool:
        """Whether there is something to read; then the caller has the reader's lock."""
        if not self._open or not self._give_up.alive:
            return False
        if not self._reader.acquire(blocking=False):
            raise ConfigError("another thread or task reads this stream; words are for one: let each open its own")
        return True

    def _take(self, word: Started | Answer | Advance | Finished | None) -> Advance | Finished | None:
        if word is None:
            return None
        if not isinstance(word, Advance | Finished):
            raise LeafsumError(f"expected progress of a request, got {type(word).__name__}")
        request = self._requests[word.request_id]
        if isinstance(word, Advance):
            request.output.extend(word.token_ids)
            self._num_prompt_tokens += word.num_prompt_rows
            self._num_output_tokens += len(word.token_ids)
        else:
            self._completions[request.index] = request.completion(word, self._tokenizer)
            del self._open[word.request_id]
            self._conversation.go_on(self._batch, word.request_id)
        return word

    def _all_completions(self) -> list[Completion]:
        if self._open:
            raise ConfigError(
                f"this stream was closed while {len(self._open)} of its {len(self._requests)} prompts were under way: "
                "read it to its end, or call result(), inside the with block"
            )
        return [self._completions[index] for index in range(len(self._requests))]

    def _delta(self, word: Advance | Finished) -> Delta:
        request = self._requests[word.request_id]
        index = request.index
        text = self._text_of(request)
        if isinstance(word, Advance):
            return Delta(index, word.token_ids, text.push(word.token_ids) if text else None)
        completion = self._completions[index]
        self._texts.pop(index, None)
        return Delta(index, (), text.rest_of(completion.text or "") if text else None, completion)

    def _text_of(self, request: OpenRequest) -> _CertainText | None:
        """Of a prompt that is read token by token; of thousands that wait, none is made before."""
        if self._tokenizer is None:
            return None
        if request.index not in self._texts:
            self._texts[request.index] = _CertainText(self._tokenizer, request.params.stop_strings)
        return self._texts[request.index]

    def _progress(self) -> Progress:
        num_finished = len(self._completions)
        return Progress(num_finished, len(self._requests), self._num_prompt_tokens, self._num_output_tokens)


class _CertainText:
    """One prompt's text, in pieces that nothing can change any more."""

    def __init__(self, tokenizer: Tokenizer, stop_strings: tuple[str, ...]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stop_strings = stop_strings
        self._beginnings = Beginnings(stop_strings)
        self._told: list[str] = []
        self._untold = ""

    def push(self, token_ids: Sequence[int]) -> str:
        new = "".join(map(self._detokenizer.push, token_ids))
        self._untold += new
        found = first_stop(self._untold, self._stop_strings)
        end = found[0] if found else len(self._untold) - self._beginnings.push(new)
        self._told.append(self._untold[:end])
        self._untold = self._untold[end:]
        return self._told[-1]

    def rest_of(self, text: str) -> str:
        """What is left to tell of the whole text."""
        told = "".join(self._told)
        if not text.startswith(told):
            raise ModelError(
                "stream: the model folder's tokenizer.json has a decoder that changes earlier text because of later "
                f"tokens; expected the text to begin with {told!r}, found {text!r}. Use generate for this model"
            )
        return text[len(told) :]
