"""The scheduler: which rows the next step computes. Pure bookkeeping; it does no I/O and knows no process.

Requests wait in arrival order. One is admitted when a slot is free and the KV pages of its whole life (prompt and
max_tokens) are: an admitted request always finishes, nothing is ever taken back. A step holds one row of every decoding
request, then at most `prefill_chunk` prompt rows of the admitted ones, oldest first. None of this can change a token.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from ..errors import ConfigError, PromptError
from ..ranks.messages import Admit, Plan, Run, RunResult
from ..ranks.numerics import HASH_MODULUS
from .settings import Settings
from .stop_strings import StopFinder

MAX_PAGES = 2**22
"""KV pages of a run: a plan that admits requests for all of them must stay within a message."""

MAX_PROMPT_ROWS = 2**20
"""Prompt rows of one step where `prefill_chunk` sets no limit: the plan must stay within a message."""

FinishReason = Literal["", "stop", "length", "cancelled", "failed"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What fits. `prefill_chunk` 0: a prompt is one chunk. `max_context`: the most positions one request may take."""

    prefill_chunk: int
    concurrency: int
    num_slots: int
    num_pages: int
    page_size: int
    max_context: int

    @classmethod
    def of(cls, settings: Settings, model_max_context: int) -> Limits:
        """`kv_tokens` rounded up to pages, shared by `concurrency` slots.

        Raises ConfigError for a context the model lacks.
        """
        if settings.max_context > model_max_context:
            raise ConfigError(
                f"max_context: expected at most {model_max_context:,} (the model's), got {settings.max_context:,}"
            )
        num_pages = -(-settings.kv_tokens // settings.page_size)
        if num_pages > MAX_PAGES:
            raise ConfigError(
                f"kv_tokens {settings.kv_tokens:,} in pages of {settings.page_size} are {num_pages:,} pages; at most "
                f"{MAX_PAGES:,} can be handed out. Raise --page-size"
            )
        return cls(
            prefill_chunk=settings.prefill_chunk,
            concurrency=settings.concurrency,
            num_slots=settings.concurrency,
            num_pages=num_pages,
            page_size=settings.page_size,
            max_context=min(settings.max_context or model_max_context, num_pages * settings.page_size),
        )

    def check_fits(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raise PromptError for a request that could never run, whatever else finishes."""
        num_positions = num_prompt_tokens + max_tokens
        if num_prompt_tokens < 1:
            raise PromptError("expected a prompt of at least one token, got none")
        if max_tokens < 1:
            raise PromptError(f"expected max_tokens of at least 1, got {max_tokens}")
        if num_positions > self.max_context:
            largest = self.max_context - num_prompt_tokens
            advice = f"ask for at most {largest:,} tokens" if largest > 0 else "shorten the prompt"
            raise PromptError(
                f"a prompt of {num_prompt_tokens:,} tokens with max_tokens {max_tokens:,} needs {num_positions:,} "
                f"positions; this pool serves {self.max_context:,} (the least of the model's context, --max-context "
                f"and --kv-tokens): {advice}"
            )


@dataclass(slots=True)
class Request:
    """One request and how far it is. `residual_hash` sums over all its rows, whatever steps they fell into.

    `stop_string` is the one that ended it, empty where none did.
    """

    request_id: int
    prompt: tuple[int, ...]
    max_tokens: int
    stop_ids: frozenset[int]
    stop_finder: StopFinder | None = None
    stop_string: str = ""
    slot: int = -1
    page_ids: tuple[int, ...] = ()
    num_prompt_done: int = 0
    output: list[int] = field(default_factory=list)
    residual_hash: int = 0
    logits_sha256: str = ""
    layer_hashes: bytearray = field(default_factory=bytearray)

    def num_pages(self, page_size: int) -> int:
        return -(-(len(self.prompt) + self.max_tokens) // page_size)


@dataclass(frozen=True, slots=True)
class RequestStep:
    """What a step did for one request. `finish_reason` is "" while it goes on; `error` says why it is "failed"."""

    request: Request
    num_prompt_rows: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    error: str = ""


class Scheduler:
    def __init__(self, limits: Limits, num_layers: int) -> None:
        self.limits = limits
        self.num_layers = num_layers
        self.waiting: deque[Request] = deque()
        self.live: dict[int, Request] = {}
        """Admitted requests by slot, oldest first."""
        self.step = 0
        self.most_rows = 0
        self.most_live_requests = 0
        self._free_slots = list(range(limits.num_slots - 1, -1, -1))
        self._free_pages = list(range(limits.num_pages - 1, -1, -1))
        self._releases: list[int] = []

    @property
    def num_open(self) -> int:
        return len(self.waiting) + len(self.live)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises PromptError for one that could never run, whatever else finishes."""
        self.limits.check_fits(len(request.prompt), request.max_tokens)
        self.waiting.append(request)

    def cancel(self, request_id: int) -> Request | None:
        """End a request as it is; its slot and pages are free from the next step on. None if it is not open."""
        for request in self.waiting:
            if request.request_id == request_id:
                self.waiting.remove(request)
                return request
        for request in self.live.values():
            if request.request_id == request_id:
                self._release(request)
                return request
        return None

    def plan(self) -> Plan | None:
        """The next step, or None when there is nothing to compute. Call `apply` with its results before the next."""
        releases, self._releases = tuple(self._releases), []
        admits = self._admit()
        runs = self._decode_runs()
        runs += self._prompt_runs()
        if not runs:
            self._releases = list(releases)
            return None
        self.most_rows = max(self.most_rows, sum(max(1, len(run.token_ids)) for run in runs))
        self.most_live_requests = max(self.most_live_requests, len(self.live))
        self.step += 1
        return Plan(step=self.step, releases=releases, admits=admits, runs=tuple(runs))

    def apply(self, plan: Plan, results: tuple[RunResult, ...]) -> list[RequestStep]:
        """Take a step's results in; returns what it did for each of its requests, in the plan's order."""
        return [self._advance(run, result) for run, result in zip(plan.runs, results, strict=True)]

    def _admit(self) -> tuple[Admit, ...]:
        admits = []
        while self.waiting and len(self.live) < self.limits.concurrency:
            num_pages = self.waiting[0].num_pages(self.limits.page_size)
            if num_pages > len(self._free_pages):
                break  # strictly in order: a small request never starves a large one
            request = self.waiting.popleft()
            request.slot = self._free_slots.pop()
            request.page_ids = tuple(self._free_pages.pop() for _ in range(num_pages))
            self.live[request.slot] = request
            admits.append(Admit(slot=request.slot, page_ids=request.page_ids))
        return tuple(admits)

    def _decode_runs(self) -> list[Run]:
        return [
            Run(slot=slot, start=len(request.prompt) + len(request.output) - 1, token_ids=(), decides=True)
            for slot, request in self.live.items()
            if request.output
        ]

    def _prompt_runs(self) -> list[Run]:
        runs = []
        budget_rows = self.limits.prefill_chunk or MAX_PROMPT_ROWS
        for slot, request in self.live.items():
            start = request.num_prompt_done
            end = min(len(request.prompt), start + budget_rows)
            if start < end:
                budget_rows -= end - start
                decides = end == len(request.prompt)
                runs.append(Run(slot=slot, start=start, token_ids=request.prompt[start:end], decides=decides))
        return runs

    def _advance(self, run: Run, result: RunResult) -> RequestStep:
        request = self.live[run.slot]
        request.num_prompt_done += len(run.token_ids)
        request.residual_hash = (request.residual_hash + result.residual_hash) % HASH_MODULUS
        request.layer_hashes += result.layer_hashes
        if result.bad_layer >= 0:
            return self._finish(request, run, (), "failed", describe_bad(result, self.num_layers))
        if not run.decides:
            return RequestStep(request, len(run.token_ids), (), "")
        request.output.append(result.token_id)
        request.logits_sha256 = result.logits_sha256
        reason: FinishReason = ""
        if request.stop_finder is not None:
            request.stop_string = request.stop_finder.push(result.token_id)
        if request.stop_string or result.token_id in request.stop_ids:
            reason = "stop"
        elif len(request.output) == request.max_tokens:
            reason = "length"
        return self._finish(request, run, (result.token_id,), reason)

    def _finish(
        self, request: Request, run: Run, token_ids: tuple[int, ...], finish_reason: FinishReason, error: str = ""
    ) -> RequestStep:
        if finish_reason:
            self._release(request)
        return RequestStep(request, len(run.token_ids), token_ids, finish_reason, error)

    def _release(self, request: Request) -> None:
        del self.live[request.slot]
        self._releases.append(request.slot)
        self._free_slots.append(request.slot)
        self._free_pages.extend(reversed(request.page_ids))


def describe_bad(result: RunResult, num_layers: int) -> str:
    where = "the logits" if result.bad_layer == num_layers else f"layer {result.bad_layer}"
    return (
        f"values of position {result.bad_position} are not finite from {where} on; other requests are not touched. "
        "Check the weights and the dtype"
    )
