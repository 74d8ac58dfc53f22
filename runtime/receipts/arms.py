"""Arms of a receipt: which settings are crossed, and which of them need ranks of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product

from ...errors import ConfigError
from ..settings import RULES, Settings, flag_of

ARM_FIELDS = ("tp", "exchange", "placement", "threads", "prefill_chunk", "concurrency")
"""The crossed settings. The first four need a new gang; the last two change while the pool is idle."""

NO_EXCHANGE = "none"
"""Exchange and placement of an arm with one rank, where nothing travels and everything is owned by it."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One column of the matrix. All of these settings keep bits, so every arm must give the same hashes."""

    tp: int
    exchange: str
    placement: str
    threads: int
    prefill_chunk: int
    concurrency: int

    @property
    def name(self) -> str:
        chunk = self.prefill_chunk or "whole"
        travel = "" if self.tp == 1 else f" {self.exchange} {self.placement}"
        return f"tp {self.tp}{travel} threads {self.threads} chunk {chunk} concurrency {self.concurrency}"

    @property
    def gang(self) -> tuple[int, str, str, int]:
        """What a running pool cannot change."""
        return self.tp, self.exchange, self.placement, self.threads

    def to_dict(self) -> dict[str, str | int]:
        found: dict[str, str | int] = {name: getattr(self, name) for name in ARM_FIELDS}
        return found | {"prefill_chunk": self.prefill_chunk or "whole"}

    def settings(self, base: Settings) -> Settings:
        """`base` with this arm's settings, digests always on."""
        changed = replace(
            base,
            tp=self.tp,
            threads=self.threads,
            prefill_chunk=self.prefill_chunk,
            concurrency=self.concurrency,
            digests=True,
        )
        if self.tp == 1:
            return changed
        return replace(changed, exchange=self.exchange, placement=self.placement)


@dataclass(frozen=True, slots=True)
class Axes:
    """The values of every crossed setting; the first of each is its default, all first ones make the reference arm."""

    tp: tuple[int, ...]
    exchange: tuple[str, ...]
    placement: tuple[str, ...]
    threads: tuple[int, ...]
    prefill_chunk: tuple[int, ...]
    concurrency: tuple[int, ...]

    @classmethod
    def parse(cls, texts: Mapping[str, str]) -> Axes:
        """'1,2,3' a setting; ConfigError names the flag and the value that its rule refuses."""
        return cls(**{name: _values(name, texts[name]) for name in ARM_FIELDS})  # type: ignore[arg-type]

    def arms(self, cross: str) -> list[Arm]:
        """The arms, those of one gang side by side, the reference first.

        "full" is every combination. "cheap" is every tp x exchange x placement with the first of all else; every
        chunk x concurrency, and every thread count, at each tp with the first of all else.
        """
        first = replace(self, **{name: getattr(self, name)[:1] for name in ARM_FIELDS[1:]})
        parts = [self]
        if cross == "cheap":
            parts = [
                replace(first, exchange=self.exchange, placement=self.placement),
                replace(first, prefill_chunk=self.prefill_chunk, concurrency=self.concurrency),
                replace(first, threads=self.threads),
            ]
        found = dict.fromkeys(arm for part in parts for arm in part._product())
        gangs = list(dict.fromkeys(arm.gang for arm in sorted(found, key=lambda arm: self.tp.index(arm.tp))))
        return sorted(found, key=lambda arm: gangs.index(arm.gang))

    def _product(self) -> Iterator[Arm]:
        for values in product(*(getattr(self, name) for name in ARM_FIELDS)):
            arm = Arm(*values)
            yield replace(arm, exchange=NO_EXCHANGE, placement=NO_EXCHANGE) if arm.tp == 1 else arm


def gangs_of(arms: Sequence[Arm]) -> list[list[Arm]]:
    """Arms grouped by the gang that serves them, in order."""
    return [list(group) for _, group in groupby(arms, key=lambda arm: arm.gang)]


def _values(name: str, text: str) -> tuple[str | int | float | bool, ...]:
    values = tuple(RULES[name].read(part.strip(), flag_of(name)) for part in text.split(","))
    if len(set(values)) != len(values):
        raise ConfigError(f"{flag_of(name)}: expected different values, found {text!r}")
    return values
