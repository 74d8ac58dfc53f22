"""The scheduler: which rows the next step computes. Pure bookkeeping; it does no I/O and knows no process.

Requests wait in arrival order. One is admitted when a slot is free and the KV pages of its whole life (prompt and
max_tokens) are: an admitted request always finishes, nothing is ever taken back. A step holds one row of every decoding
request, then at most `prefill_chunk` known rows of the admitted ones, oldest first. None of this can change a token.

A lost gang takes all states with it, and no token. Every request then starts anew with the tokens it has: their rows
are known, as a prompt's are, and those that drew a token draw it again, which proves that nothing has changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import NoReturn

from ..errors import RankMismatch
from ..ranks.messages import Admit, Plan, Run, RunResult
from .limits import Limits
from .request import FinishReason, Mark, Request, RequestStep

MAX_PROMPT_ROWS = 2**20
"""Prompt rows of one step where `prefill_chunk` sets no limit: the plan must stay within a message."""

MAX_REDRAWN_ROWS = 4096
"""Rows of one step that draw a token again: each has an answer of its own, of 200 bytes and 8 a layer."""

MAX_STRIKES = 2
"""Gangs that one request may lose with the same rows, the last of them alone."""


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
        self._free_slots: list[int]
        self._free_pages: list[int]
        self._releases: list[int]
        self._free_all()

    @property
    def num_open(self) -> int:
        return len(self.waiting) + len(self.live)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises PromptError for one that could never run, whatever else finishes."""
        self.limits.check_fits(len(request.prompt), request.max_tokens)
        self.waiting.append(request)

    def cancel(self, request_ids: Collection[int]) -> list[Request]:
        """End requests as they are; slots and pages are free from the next step on. Returns those that were open."""
        wanted = frozenset(request_ids)
        return self._drop([request for request in [*self.waiting, *self.live.values()] if request.request_id in wanted])

    def drain(self) -> list[Request]:
        """End all requests that have not begun."""
        return self._drop([request for request in self.waiting if not request.has_begun])

    def lose(self, plan: Plan | None, *, by_its_rows: bool) -> list[Request]:
        """The gang was lost, with `plan` under way (None: with none). Every request starts anew with the tokens it has.

        `by_its_rows`: a rank's own doing, so that a request of the plan may be the cause. Those are computed alone from
        now on, one after the other, until past the rows of the plan. One that was alone in it, and has lost a gang
        before with these rows, is ended; returns those.
        """
        culprits = self._drop(self._accuse(plan)) if plan is not None and by_its_rows else []
        for request in reversed(self.live.values()):
            request.lose()
            self.waiting.appendleft(request)
        self.live = {}
        self._free_all()
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

    def _free_all(self) -> None:
        """As a gang begins."""
        self._free_slots = list(range(self.limits.num_slots - 1, -1, -1))
        self._free_pages = list(range(self.limits.num_pages - 1, -1, -1))
        self._releases = []

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
        on_trial = [request for request in self.live.values() if request.suspect_rows]
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
                runs += request.known_runs(end)
        return runs

    def _advance(self, request: Request, run: Run, result: RunResult) -> RequestStep:
        num_prompt = len(request.prompt)
        request.take_in(result, run.start + max(1, len(run.token_ids)))
        num_prompt_rows = max(0, min(request.num_rows_done, num_prompt) - request.num_prompt_told)
        request.num_prompt_told += num_prompt_rows
        if request.lost is not None and request.num_rows_done <= request.lost.num_rows:
            self._compare(request, result, request.lost)
        elif result.bad_layer >= 0:
            self._release(request)
            return RequestStep(request, num_prompt_rows, (), "failed", describe_bad(result, self.num_layers))
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
        index = request.num_rows_done - len(request.prompt)
        if result.bad_layer >= 0:
            self._refuse(request, "finite values, as the lost gang had them", describe_bad(result, self.num_layers))
        if index >= 0 and result.token_id != request.output[index]:
            drawn = f"token {request.output[index]}, which the lost gang drew and which was told"
            self._refuse(request, drawn, str(result.token_id))
        if request.num_rows_done == lost.num_rows:
            if request.mark() != lost:
                residual = f"residual {lost.residual_hash:016x} of all rows, as the lost gang had it"
                self._refuse(request, residual, f"{request.residual_hash:016x}")
            request.lost = None

    def _refuse(self, request: Request, expected: str, found: str) -> NoReturn:
        raise RankMismatch(
            f"after a recovery, request {request.request_id}, position {request.num_rows_done - 1}: expected "
            f"{expected}, got {found}. The model's files, the machine or a rank is not what it was: nothing more was "
            "released",
            rank=-1,
            step=self.step,
        )

    def _accuse(self, plan: Plan) -> list[Request]:
        """Every request of the plan comes under suspicion; returns the one that is beyond doubt, if there is one."""
        rows: dict[int, range] = {}
        for run in plan.runs:
            begin = rows.get(run.slot, range(run.start, run.start)).start
            rows[run.slot] = range(begin, run.start + max(1, len(run.token_ids)))
        for slot, suspect_rows in rows.items():
            self.live[slot].suspect(suspect_rows)
        return [self.live[slot] for slot in rows if len(rows) == 1 and self.live[slot].num_strikes >= MAX_STRIKES]

    def _drop(self, requests: list[Request]) -> list[Request]:
        """End these as they are; returns them."""
        for request in requests:
            request.give_up()
            if request.slot in self.live:
                self._release(request)
        dropped = {request.request_id for request in requests}
        self.waiting = deque(request for request in self.waiting if request.request_id not in dropped)
        return requests

    def _release(self, request: Request) -> None:
        del self.live[request.slot]
        self._releases.append(request.slot)
        self._free_slots.append(request.slot)
        self._free_pages.extend(reversed(request.page_ids))
        request.slot = -1


def describe_bad(result: RunResult, num_layers: int) -> str:
    where = "the logits" if result.bad_layer == num_layers else f"layer {result.bad_layer}"
    return (
        f"values of position {result.bad_position} are not finite from {where} on; other requests are not touched. "
        "Check the weights and the dtype"
    )
