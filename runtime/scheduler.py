"""The scheduler: which rows the next step computes. Pure bookkeeping; it does no I/O and knows no process.

Requests wait in arrival order. One is admitted when a slot is free and the KV pages of its whole life (prompt and
max_tokens) are: an admitted request always finishes, nothing is ever taken back. A step holds one row of every decoding
request, then at most `prefill_chunk` known rows of the admitted ones, oldest first. None of this can change a token.

A lost gang takes all states with it, and no token. Every request then starts anew with the tokens it has: their rows
are known, as a prompt's are, and those that drew a token draw it again, which proves that nothing has changed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from ..errors import ConfigError, PromptError, RankMismatch
from ..ranks.messages import Admit, Plan, Run, RunResult
from ..ranks.numerics import HASH_MODULUS
from .settings import Settings
from .stop_strings import StopFinder

MAX_PAGES = 2**22
"""KV pages of a run: a plan that admits requests for all of them must stay within a message."""

MAX_PROMPT_ROWS = 2**20
"""Prompt rows of one step where `prefill_chunk` sets no limit: the plan must stay within a message."""

MAX_REDRAWN_ROWS = 4096
"""Rows of one step that draw a token again: each has an answer of its own, of 200 bytes and 8 a layer."""

MAX_STRIKES = 2
"""Gangs that one request may lose with the same rows, the last of them alone."""

CHANGED = "The model's files, the machine or a rank is not what it was: nothing more was released"

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


@dataclass(frozen=True, slots=True)
class Mark:
    """What a lost gang had come to with a request, after `num_rows` rows: the next gang must come to the same."""

    num_rows: int
    residual_hash: int
    logits_sha256: str
    layer_hashes: bytes


@dataclass(slots=True)
class Request:
    """One request and how far it is. `residual_hash` sums over all its rows, whatever steps they fell into.

    `num_rows_done` counts the rows that this gang has computed, `num_prompt_told` the prompt rows that any has.
    `stop_string` is the one that ended it, empty where none did. `lost` is there until a gang has made good what
    another took along. `trial_rows` above 0: it may have killed ranks `num_strikes` times, and is computed alone until
    it has as many rows.
    """

    request_id: int
    prompt: tuple[int, ...]
    max_tokens: int
    stop_ids: frozenset[int]
    stop_finder: StopFinder | None = None
    stop_string: str = ""
    slot: int = -1
    page_ids: tuple[int, ...] = ()
    num_rows_done: int = 0
    num_prompt_told: int = 0
    output: list[int] = field(default_factory=list)
    residual_hash: int = 0
    logits_sha256: str = ""
    layer_hashes: bytearray = field(default_factory=bytearray)
    has_begun: bool = False
    lost: Mark | None = None
    num_recoveries: int = 0
    num_strikes: int = 0
    trial_rows: int = 0

    @property
    def num_known(self) -> int:
        """Positions whose token is known."""
        return len(self.prompt) + len(self.output)

    @property
    def goes_on(self) -> bool:
        """Whether its next row is that of the token which the ranks drew last."""
        return bool(self.output) and self.num_rows_done == self.num_known - 1

    def num_pages(self, page_size: int) -> int:
        return -(-(len(self.prompt) + self.max_tokens) // page_size)

    def take_in(self, result: RunResult, num_rows_done: int) -> None:
        """The hashes of a run that ends after `num_rows_done` rows."""
        self.num_rows_done = num_rows_done
        self.residual_hash = (self.residual_hash + result.residual_hash) % HASH_MODULUS
        self.layer_hashes += result.layer_hashes
        self.logits_sha256 = result.logits_sha256 or self.logits_sha256
        if num_rows_done >= self.trial_rows:
            self.num_strikes = self.trial_rows = 0

    def mark(self) -> Mark:
        return Mark(self.num_rows_done, self.residual_hash, self.logits_sha256, bytes(self.layer_hashes))

    def lose(self) -> None:
        """The gang is gone, and with it every row: start anew. Without a token out, nothing binds the next gang."""
        if self.output and self.lost is None:
            self.lost = self.mark()
        self.slot, self.page_ids = -1, ()
        self.num_rows_done = self.residual_hash = 0
        self.logits_sha256 = ""
        self.layer_hashes = bytearray()
        self.num_recoveries += 1

    def give_up(self) -> None:
        """It ends as it is: what it has come to is what the lost gang had, where no other has come as far."""
        if self.lost is not None:
            self.residual_hash, self.logits_sha256 = self.lost.residual_hash, self.lost.logits_sha256
            self.layer_hashes = bytearray(self.lost.layer_hashes)


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
        for request in [*self.waiting, *self.live.values()]:
            if request.request_id == request_id:
                self._drop(request)
                return request
        return None

    def drain(self) -> list[Request]:
        """End all requests that have not begun."""
        drained = [request for request in self.waiting if not request.has_begun]
        for request in drained:
            self._drop(request)
        return drained

    def lose(self, plan: Plan | None, *, by_its_rows: bool) -> list[Request]:
        """The gang was lost, with `plan` under way (None: with none). Every request starts anew with the tokens it has.

        `by_its_rows`: a rank's own doing, so that a request of the plan may be the cause. Those are computed alone from
        now on, one after the other, until past the rows of the plan. One that was alone in it, and has lost a gang
        before with these rows, is ended; returns those.
        """
        culprits = self._accuse(plan) if plan is not None and by_its_rows else []
        for request in culprits:
            self._drop(request)
        for request in reversed(self.live.values()):
            request.lose()
            self.waiting.appendleft(request)
        self.live = {}
        self._free_slots = list(range(self.limits.num_slots - 1, -1, -1))
        self._free_pages = list(range(self.limits.num_pages - 1, -1, -1))
        self._releases = []
        return culprits

    def plan(self) -> Plan | None:
        """The next step, or None when there is nothing to compute. Call `apply` with its results before the next."""
        releases, self._releases = tuple(self._releases), []
        admits = self._admit()
        runs = self._runs()
        if not runs:
            self._releases = list(releases)
            return None
        self.most_rows = max(self.most_rows, sum(max(1, len(run.token_ids)) for run in runs))
        self.most_live_requests = max(self.most_live_requests, len(self.live))
        self.step += 1
        return Plan(step=self.step, releases=releases, admits=admits, runs=tuple(runs))

    def apply(self, plan: Plan, results: tuple[RunResult, ...]) -> list[RequestStep]:
        """Take a step's results in; returns what it did for each of its requests, in the plan's order.

        Raises RankMismatch where a row that another gang had computed comes to something else.
        """
        return [
            self._advance(self.live[run.slot], run, result)
            for run, result in zip(plan.runs, results, strict=True)
            if run.slot in self.live  # not of a request that an earlier run of the same step has ended
        ]

    def _admit(self) -> tuple[Admit, ...]:
        admits = []
        while self.waiting and len(self.live) < self.limits.concurrency:
            num_pages = self.waiting[0].num_pages(self.limits.page_size)
            if num_pages > len(self._free_pages):
                break  # strictly in order: a small request never starves a large one
            request = self.waiting.popleft()
            request.has_begun = True
            request.slot = self._free_slots.pop()
            request.page_ids = tuple(self._free_pages.pop() for _ in range(num_pages))
            self.live[request.slot] = request
            admits.append(Admit(slot=request.slot, page_ids=request.page_ids))
        return tuple(admits)

    def _runs(self) -> list[Run]:
        """One row of each that goes on, then known rows; of requests on trial, only the first."""
        on_trial = [request for request in self.live.values() if request.trial_rows]
        on_turn = on_trial[:1] or list(self.live.values())
        runs = [
            Run(slot=request.slot, start=request.num_rows_done, token_ids=(), decides=True)
            for request in on_turn
            if request.goes_on
        ]
        budget_rows = self.limits.prefill_chunk or MAX_PROMPT_ROWS
        budget_redrawn = MAX_REDRAWN_ROWS
        for request in on_turn:
            if not request.goes_on:
                begin, num_prompt = request.num_rows_done, len(request.prompt)
                end = min(request.num_known, begin + budget_rows, max(begin, num_prompt) + budget_redrawn)
                budget_rows -= end - begin
                budget_redrawn -= max(0, end - max(begin, num_prompt))
                runs += known_runs(request, end)
        return runs

    def _advance(self, request: Request, run: Run, result: RunResult) -> RequestStep:
        num_prompt = len(request.prompt)
        request.take_in(result, run.start + max(1, len(run.token_ids)))
        num_prompt_rows = max(0, min(request.num_rows_done, num_prompt) - request.num_prompt_told)
        request.num_prompt_told += num_prompt_rows
        if result.bad_layer >= 0:
            self._release(request)
            return RequestStep(request, num_prompt_rows, (), "failed", describe_bad(result, self.num_layers))
        if request.lost is not None and request.num_rows_done <= request.lost.num_rows:
            self._compare(request, result, request.lost)
        elif run.decides:
            return RequestStep(request, num_prompt_rows, (result.token_id,), self._push(request, result.token_id))
        return RequestStep(request, num_prompt_rows, (), "")

    def _push(self, request: Request, token_id: int) -> FinishReason:
        """Take a new token in; the reason if it is the last."""
        request.output.append(token_id)
        if request.stop_finder is not None:
            request.stop_string = request.stop_finder.push(token_id)
        reason: FinishReason = ""
        if request.stop_string or token_id in request.stop_ids:
            reason = "stop"
        elif len(request.output) == request.max_tokens:
            reason = "length"
        if reason:
            self._release(request)
        return reason

    def _compare(self, request: Request, result: RunResult, lost: Mark) -> None:
        """A row that a lost gang had computed, and maybe a token that was told: both must come out as they did."""
        where = f"after a recovery, request {request.request_id}, position {request.num_rows_done - 1}"
        index = request.num_rows_done - len(request.prompt)
        if index >= 0 and result.token_id != request.output[index]:
            raise RankMismatch(
                f"{where}: expected token {request.output[index]}, which the lost gang drew and which was told, got "
                f"{result.token_id}. {CHANGED}",
                rank=0,
                step=self.step,
            )
        if request.num_rows_done == lost.num_rows:
            if request.mark() != lost:
                raise RankMismatch(
                    f"{where}: expected residual {lost.residual_hash:016x} of all rows, as the lost gang had it, got "
                    f"{request.residual_hash:016x}. {CHANGED}",
                    rank=0,
                    step=self.step,
                )
            request.lost = None

    def _accuse(self, plan: Plan) -> list[Request]:
        """A strike for every request of the plan; returns those that are beyond doubt."""
        accused = {run.slot: run.start + max(1, len(run.token_ids)) for run in plan.runs}
        for slot, num_rows in accused.items():
            request = self.live[slot]
            request.num_strikes += 1
            request.trial_rows = max(request.trial_rows, num_rows)
        return [self.live[slot] for slot in accused if len(accused) == 1 and self.live[slot].num_strikes >= MAX_STRIKES]

    def _drop(self, request: Request) -> None:
        request.give_up()
        if request.slot in self.live:
            self._release(request)
        else:
            self.waiting.remove(request)

    def _release(self, request: Request) -> None:
        del self.live[request.slot]
        self._releases.append(request.slot)
        self._free_slots.append(request.slot)
        self._free_pages.extend(reversed(request.page_ids))
        request.slot = -1


def known_runs(request: Request, end: int) -> list[Run]:
    """The known rows from where the request is up to position `end`: a prompt's as one run, and each row that has
    drawn a token as one of its own, to draw it again.
    """
    slot, start, num_prompt = request.slot, request.num_rows_done, len(request.prompt)
    runs = []
    cut = min(end, num_prompt)
    if start < cut:
        runs.append(Run(slot=slot, start=start, token_ids=request.prompt[start:cut], decides=cut == num_prompt))
    for position in range(max(start, num_prompt), end):
        token_id = request.output[position - num_prompt]
        runs.append(Run(slot=slot, start=position, token_ids=(token_id,), decides=True))
    return runs


def describe_bad(result: RunResult, num_layers: int) -> str:
    where = "the logits" if result.bad_layer == num_layers else f"layer {result.bad_layer}"
    return (
        f"values of position {result.bad_position} are not finite from {where} on; other requests are not touched. "
        "Check the weights and the dtype"
    )
