"""One request on the coordinator's side: how far it is, what a lost gang had made of it, and what it may have done."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..ranks.messages import Run, RunResult
from ..ranks.numerics import HASH_MODULUS
from .stop_strings import StopFinder

FinishReason = Literal["", "stop", "length", "cancelled", "failed"]


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
    another took along. `suspect_rows` not empty: it may have killed ranks with these, `num_strikes` times, and is
    computed alone until it is past them.
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
    suspect_rows: range = range(0)

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

    def known_runs(self, end: int) -> list[Run]:
        """The known rows from where it is up to position `end`: a prompt's as one run, and each row that has drawn a
        token as one of its own, to draw it again.
        """
        num_prompt, start = len(self.prompt), self.num_rows_done
        cut = min(end, num_prompt)
        runs = []
        if start < cut:
            tokens = self.prompt[start:cut]
            runs.append(Run(slot=self.slot, start=start, token_ids=tokens, decides=cut == num_prompt))
        for position in range(max(start, num_prompt), end):
            token_id = self.output[position - num_prompt]
            runs.append(Run(slot=self.slot, start=position, token_ids=(token_id,), decides=True))
        return runs

    def take_in(self, result: RunResult, num_rows_done: int) -> None:
        """The hashes of a run that ends after `num_rows_done` rows."""
        self.num_rows_done = num_rows_done
        self.residual_hash = (self.residual_hash + result.residual_hash) % HASH_MODULUS
        self.layer_hashes += result.layer_hashes
        self.logits_sha256 = result.logits_sha256 or self.logits_sha256
        if num_rows_done >= self.suspect_rows.stop:
            self.num_strikes, self.suspect_rows = 0, range(0)

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

    def suspect(self, rows: range) -> None:
        """A gang was lost with these rows. Only with rows that lost one before is it a second strike."""
        before = self.suspect_rows
        is_again = rows.start < before.stop and before.start < rows.stop
        self.num_strikes = self.num_strikes + 1 if is_again else 1
        self.suspect_rows = range(min(rows.start, before.start), max(rows.stop, before.stop)) if before else rows

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

    @property
    def is_news(self) -> bool:
        """Whether the pool hears of it: not of rows that another gang had computed."""
        return bool(self.num_prompt_rows or self.token_ids or self.finish_reason)
