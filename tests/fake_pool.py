"""A WorkerPool without processes: tokens are a function of the prompt alone (the row law) until a test spoils them."""

from __future__ import annotations

import hashlib
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType

import pytest
import tokenizers
from leafsum.errors import LeafsumError, RankMismatch
from leafsum.runtime.sampling import Completion, SamplingParams, token_sha256
from leafsum.runtime.settings import Settings
from leafsum.runtime.stream import Delta
from leafsum.runtime.witness import Progress, RankWitness, Witness

Spoil = Callable[[Settings, int, Completion], Completion]

LAYERS = 4

BYTES_PER_EXCHANGE = 1_234_560
"""Of as many digits as a real arm has in all."""

CALLS_PER_GENERATE = 80
"""Collective calls of every rank."""


def flipped_bit(last_rank: int = 1) -> RankMismatch:
    """What ends a run in which one bit of the last rank is another one, in layer 1."""
    where = "run f00: ranks disagree at step 1, slot 1, position 14, layer 1"
    text = f"{where}: rank 0 has token 59; rank {last_rank} has token 59"
    return RankMismatch(text, rank=last_rank, step=1)


@dataclass
class Script:
    """What a test wants of all fake pools, and what they saw.

    `powerless`: prompts (from 0) by the control that does not change them; `ends`: the error by the control that ends
    a run, besides the flipped bit that ranks notice; `others`: what every rank does otherwise than it was asked to, by
    its name in RankWitness; `seen`: the prompts in the order in which pools first got them, in a receipt their own.
    """

    spoil: Spoil = lambda _settings, _index, completion: completion
    silent_rank: int = -1
    others: dict[str, object] = field(default_factory=dict)
    notices_flipped_bit: bool = True
    live_limit: int = 1 << 30
    powerless: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ends: dict[str, LeafsumError] = field(default_factory=dict)
    hazards: dict[str, int] = field(default_factory=lambda: {"router_ties": 3, "subnormals": 2, "negative_zeros": 1})
    seen: list[tuple[int, ...]] = field(default_factory=list)
    submitted: list[list[int]] = field(default_factory=list)
    fail: BaseException | None = None
    opened: int = 0
    closed: int = 0
    num_drains: int = 0
    under_way: Callable[[], object] = lambda: None
    settings: list[Settings] | None = None


class FakeStream:
    """A letter at a time, prompt after prompt."""

    def __init__(self, completions: list[Completion], under_way: Callable[[], object]) -> None:
        self._completions = completions
        self._under_way = under_way

    def __iter__(self) -> Iterator[Delta]:
        self._under_way()
        for index, completion in enumerate(self._completions):
            for token_id in completion.token_ids:
                yield Delta(index, (token_id,), None if completion.text is None else chr(token_id))
            yield Delta(index, (), None if completion.text is None else "", completion)

    def result(self, on_progress: Callable[[Progress], None] | None = None) -> list[Completion]:
        self._under_way()
        if on_progress is not None:
            on_progress(progress_at_the_end(self._completions))
        return self._completions


class FakePool:
    script = Script()

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.concurrency = settings.concurrency
        self.prefill_chunk = settings.prefill_chunk
        self.most_rows = self.most_live = self.steps = self.exchanges = self.calls = 0
        self.script.opened += 1
        self.script.settings = [*(self.script.settings or []), settings]

    def __enter__(self) -> FakePool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.script.closed += 1

    def reconfigure(self, *, prefill_chunk: int, concurrency: int) -> None:
        assert concurrency <= self.settings.concurrency, "a pool has the slots that it was started with"
        self.prefill_chunk, self.concurrency = prefill_chunk, concurrency
        self.most_rows = self.most_live = 0

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams,
        *,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> list[Completion]:
        if self.script.fail is not None:
            raise self.script.fail
        if self.settings.control in self.script.ends:
            raise self.script.ends[self.settings.control]
        if self.settings.control == "flipped-bit" and self.script.notices_flipped_bit:
            raise flipped_bit(self.settings.tp - 1)
        found = [self._complete(prompt, sampling) for prompt in prompts]
        self.script.seen = list(dict.fromkeys([*self.script.seen, *(each.prompt_token_ids for each in found)]))
        indices = [self.script.seen.index(each.prompt_token_ids) for each in found]
        self.script.submitted.append(indices)
        found = [self._under_control(index, each) for index, each in zip(indices, found, strict=True)]
        found = [self.script.spoil(self.settings, index, each) for index, each in zip(indices, found, strict=True)]
        longest = max(len(each.prompt_token_ids) for each in found)
        self.most_rows = max(self.most_rows, min(self.prefill_chunk or longest, longest))
        self.most_live = max(self.most_live, min(self.concurrency, len(prompts), self.script.live_limit))
        self.steps += len(prompts) * sampling.max_tokens
        self.exchanges += self.settings.tp > 1
        self.calls += CALLS_PER_GENERATE
        if on_progress is not None:
            on_progress(progress_at_the_end(found))
        return found

    @contextmanager
    def stream(self, prompts: Sequence[str | Sequence[int]], sampling: SamplingParams) -> Iterator[FakeStream]:
        yield FakeStream(self.generate(prompts, sampling), self.script.under_way)

    def drain(self) -> None:
        self.script.num_drains += 1

    def witness(self) -> Witness:
        ranks = tuple(self._rank(rank) for rank in range(self.settings.tp))
        return Witness(self.steps, self.most_rows, self.most_live, ranks)

    def _rank(self, rank: int) -> RankWitness:
        exchanges = 0 if rank == self.script.silent_rank else self.exchanges
        hazards = {
            name: count * self.steps * (name != "router_ties" or self.settings.tp > 1)
            for name, count in self.script.hazards.items()
            if self.settings.hazards
        }
        num_bytes = exchanges * BYTES_PER_EXCHANGE
        found = RankWitness(
            rank=rank,
            pid=os.getpid() + rank,
            exchanges=exchanges,
            bytes_sent=num_bytes,
            bytes_received=num_bytes,
            transport={"all_gather": self.calls, "broadcast": 0},
            exchange_mode="slots" if self.settings.exchange == "auto" else self.settings.exchange,
            transport_name=self.settings.transport if self.settings.tp > 1 else "none",
            num_threads=self.settings.threads,
            poison=self.settings.poison,
            num_delays=self.calls // 8 if self.settings.delay_seed and self.settings.tp > 1 else 0,
            hazards=hazards,
        )
        return replace(found, **self.script.others)  # type: ignore[arg-type]

    def _under_control(self, index: int, completion: Completion) -> Completion:
        control = self.settings.control
        if control == "none" or index in self.script.powerless.get(control, ()):
            return completion
        return replace(completion, residual_hash=hashlib.sha256(control.encode()).hexdigest()[:16])

    def _complete(self, prompt: str | Sequence[int], sampling: SamplingParams) -> Completion:
        prompt_ids = tuple(prompt.encode()) if isinstance(prompt, str) else tuple(prompt)
        digest = hashlib.sha256(repr(prompt_ids).encode()).digest()
        token_ids = tuple(65 + digest[index % 32] % 26 for index in range(sampling.max_tokens))
        return Completion(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=prompt_ids,
            token_ids=token_ids,
            text=bytes(token_ids).decode(),
            finish_reason="length",
            token_sha256=token_sha256(token_ids),
            logits_sha256=hashlib.sha256(b"logits" + digest).hexdigest() if self.settings.digests else None,
            residual_hash=digest[:8].hex(),
            tp=self.settings.tp,
            layer_hashes=layer_hashes(digest, len(prompt_ids) + len(token_ids) - 1) * self.settings.layer_digests,
        )


def progress_at_the_end(completions: Sequence[Completion]) -> Progress:
    num_prompt_tokens = sum(len(each.prompt_token_ids) for each in completions)
    num_output_tokens = sum(len(each.token_ids) for each in completions)
    return Progress(len(completions), len(completions), num_prompt_tokens, num_output_tokens)


def layer_hashes(digest: bytes, num_rows: int) -> bytes:
    """U64 [num_rows, LAYERS]; no two are equal."""
    return b"".join(
        digest[:4] + (row * LAYERS + layer).to_bytes(4, "little") for row in range(num_rows) for layer in range(LAYERS)
    )


def with_layer(completion: Completion, position: int, layer: int) -> Completion:
    """The completion with other residuals from one place on, as a difference spreads."""
    begin = 8 * (position * LAYERS + layer)
    rest = bytes(byte ^ 0xFF for byte in completion.layer_hashes[begin:])
    return replace(completion, layer_hashes=completion.layer_hashes[:begin] + rest, residual_hash="0" * 16)


def install(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Make every command use FakePool; returns the script that steers it."""
    module = types.ModuleType("leafsum.runtime.pool")
    FakePool.script = Script()
    module.WorkerPool = FakePool  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "leafsum.runtime.pool", module)
    return FakePool.script


def with_token(completion: Completion, index: int, token_id: int) -> Completion:
    """The completion with one token changed, and its text and hash with it."""
    token_ids = (*completion.token_ids[:index], token_id, *completion.token_ids[index + 1 :])
    text = bytes(token_ids).decode(errors="replace")
    return replace(completion, token_ids=token_ids, token_sha256=token_sha256(token_ids), text=text)


def byte_level_tokenizer() -> tokenizers.Tokenizer:
    """One id a byte, <bos> 256, <eos> 257."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    return tokenizer
