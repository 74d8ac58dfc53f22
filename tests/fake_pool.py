"""A WorkerPool without processes: tokens are a function of the prompt alone (the row law) until a test spoils them."""

from __future__ import annotations

import hashlib
import os
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

import pytest
import tokenizers
from leafsum.runtime.sampling import Completion, SamplingParams, token_sha256
from leafsum.runtime.settings import Settings
from leafsum.runtime.witness import Progress, RankWitness, Witness

Spoil = Callable[[Settings, int, Completion], Completion]


@dataclass
class Script:
    """What a test wants of all fake pools, and what they saw."""

    spoil: Spoil = lambda _settings, _index, completion: completion
    silent_rank: int = -1
    live_limit: int = 1 << 30
    fail: BaseException | None = None
    opened: int = 0
    closed: int = 0
    settings: list[Settings] | None = None


class FakePool:
    script = Script()

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.concurrency = settings.concurrency
        self.prefill_chunk = settings.prefill_chunk
        self.most_rows = self.most_live = self.steps = self.exchanges = 0
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
        found = [
            self.script.spoil(self.settings, index, self._complete(prompt, sampling))
            for index, prompt in enumerate(prompts)
        ]
        longest = max(len(each.prompt_token_ids) for each in found)
        self.most_rows = max(self.most_rows, min(self.prefill_chunk or longest, longest))
        self.most_live = max(self.most_live, min(self.concurrency, len(prompts), self.script.live_limit))
        self.steps += len(prompts) * sampling.max_tokens
        self.exchanges += self.settings.tp > 1
        if on_progress is not None:
            on_progress(Progress(len(found), len(found), longest, len(found) * sampling.max_tokens))
        return found

    def witness(self) -> Witness:
        ranks = tuple(self._rank(rank) for rank in range(self.settings.tp))
        return Witness(self.steps, self.most_rows, self.most_live, ranks)

    def _rank(self, rank: int) -> RankWitness:
        exchanges = 0 if rank == self.script.silent_rank else self.exchanges
        return RankWitness(rank, os.getpid() + rank, exchanges, exchanges * 640, exchanges * 640, {})

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
        )


def install(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Make every command use FakePool; returns the script that steers it."""
    module = types.ModuleType("leafsum.runtime.pool")
    FakePool.script = Script()
    module.WorkerPool = FakePool  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "leafsum.runtime.pool", module)
    return FakePool.script


def with_token(completion: Completion, index: int, token_id: int) -> Completion:
    """The completion with one token changed, and its hash with it."""
    token_ids = (*completion.token_ids[:index], token_id, *completion.token_ids[index + 1 :])
    return replace(completion, token_ids=token_ids, token_sha256=token_sha256(token_ids))


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
