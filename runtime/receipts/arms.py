"""Arms of a receipt: which settings are crossed, and which of them need ranks of their own."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product

from ...collectives.control_names import NO_CONTROL
from ...errors import ConfigError
from ..settings import RULES, Settings, flag_of

ARM_FIELDS = ("tp", "exchange", "placement", "transport", "threads", "prefill_chunk", "concurrency")
"""The crossed settings. All but the last two need a new gang; those change while the pool is idle."""

NOT_ASKED = ("digests", "layer_digests", "recover", "recover_limit", "recover_window_s")
"""Settings that are the same in every arm, whatever a command line says: it has no flags for them."""

NO_EXCHANGE = "none"
"""Exchange, placement and transport of an arm with one rank, where nothing travels and everything is owned by it."""

AUTO = "auto"
"""The exchange of an arm that leaves it to the ranks."""

Gang = tuple[int, str, str, str, int, bool, str]


@dataclass(frozen=True, slots=True)
class Arm:
    """One column of the matrix. All of these settings keep bits, so every arm must give the same hashes.

    An adverse arm runs with NaN in all memory that must not be read, with random delays, and with its prompts
    shuffled. `control` makes the arm one that must differ.
    """

    tp: int
    exchange: str
    placement: str
    transport: str
    threads: int
    prefill_chunk: int
    concurrency: int
    adverse: bool = False
    control: str = NO_CONTROL

    @property
    def name(self) -> str:
        chunk = self.prefill_chunk or "whole"
        travel = "" if self.tp == 1 else f" {self.exchange} {self.placement} transport {self.transport}"
        return f"tp {self.tp}{travel} threads {self.threads} chunk {chunk} concurrency {self.concurrency}"

    @property
    def gang(self) -> Gang:
        """What a running pool cannot change."""
        return self.tp, self.exchange, self.placement, self.transport, self.threads, self.adverse, self.control

    @property
    def delay_seed(self) -> int:
        """Of the delays before exchanges, another one for every adverse gang; 0, no delays, where it is not adverse."""
        largest = int(RULES["delay_seed"].at_most)
        return 1 + zlib.crc32(repr(self.gang).encode()) % largest if self.adverse else 0

    @property
    def order_seed(self) -> int:
        """Of the order in which an adverse arm submits its prompts."""
        return zlib.crc32(self.name.encode())

    def to_dict(self) -> dict[str, str | int]:
        found: dict[str, str | int] = {name: getattr(self, name) for name in ARM_FIELDS}
        return found | {"prefill_chunk": self.prefill_chunk or "whole"}

    def settings(self, base: Settings) -> Settings:
        """`base` with this arm's settings; whatever can be hashed or counted is. A lost gang ends the run: an arm shows
        what its own ranks do, from its first row to its last."""
        changed = replace(
            base,
            tp=self.tp,
            threads=self.threads,
            prefill_chunk=self.prefill_chunk,
            concurrency=self.concurrency,
            digests=True,
            layer_digests=True,
            hazards=True,
            poison=self.adverse,
            delay_seed=self.delay_seed,
            control=self.control,
            recover="never",
        )
        if self.tp == 1:
            return changed
        return replace(changed, exchange=self.exchange, placement=self.placement, transport=self.transport)


@dataclass(frozen=True, slots=True)
class Axes:
    """The values of every crossed setting; the first of each is its default, all first ones make the reference arm."""

    tp: tuple[int, ...]
    exchange: tuple[str, ...]
    placement: tuple[str, ...]
    transport: tuple[str, ...]
    threads: tuple[int, ...]
    prefill_chunk: tuple[int, ...]
    concurrency: tuple[int, ...]

    @classmethod
    def parse(cls, texts: Mapping[str, str]) -> Axes:
        """'1,2,3' a setting; ConfigError names the flag and the value that its rule refuses."""
        return cls(**{name: _values(name, texts[name]) for name in ARM_FIELDS})  # type: ignore[arg-type]

    def arms(self, cross: str) -> list[Arm]:
        """The arms, those of one gang side by side: the reference first and plain, all others adverse.

        "full" is every combination. "cheap" is every tp x exchange x placement with the first of all else; every
        chunk x concurrency, every thread count, and every transport, at each tp with the first of all else.
        """
        first = replace(self, **{name: getattr(self, name)[:1] for name in ARM_FIELDS[1:]})
        parts = [self]
        if cross == "cheap":
            parts = [
                replace(first, exchange=self.exchange, placement=self.placement),
                replace(first, prefill_chunk=self.prefill_chunk, concurrency=self.concurrency),
                replace(first, threads=self.threads),
                replace(first, transport=self.transport),
            ]
        reference, *others = dict.fromkeys(arm for part in parts for arm in part._product())
        return [replace(reference, adverse=False), *self._by_gang(others)]

    def require_prompts(self, num_prompts: int) -> None:
        """ConfigError for a concurrency that so few prompts cannot show."""
        for concurrency in self.concurrency:
            if concurrency > num_prompts:
                raise ConfigError(
                    f"{flag_of('concurrency')} {concurrency} needs at least {concurrency} prompts, there are "
                    f"{num_prompts}"
                )

    def adverse_arms(self) -> list[Arm]:
        """Every combination, none of them plain."""
        return self._by_gang(dict.fromkeys(self._product()))

    def _by_gang(self, arms: Iterable[Arm]) -> list[Arm]:
        in_order = sorted(arms, key=lambda arm: self.tp.index(arm.tp))
        gangs = list(dict.fromkeys(arm.gang for arm in in_order))
        return sorted(in_order, key=lambda arm: gangs.index(arm.gang))

    def _product(self) -> Iterator[Arm]:
        for values in product(*(getattr(self, name) for name in ARM_FIELDS)):
            arm = replace(Arm(*values), adverse=True)
            nothing_travels = {"exchange": NO_EXCHANGE, "placement": NO_EXCHANGE, "transport": NO_EXCHANGE}
            yield replace(arm, **nothing_travels) if arm.tp == 1 else arm  # type: ignore[arg-type]


def gangs_of(arms: Sequence[Arm]) -> list[list[Arm]]:
    """Arms grouped by the gang that serves them, in order."""
    return [list(group) for _, group in groupby(arms, key=lambda arm: arm.gang)]


def default_concurrency(values: Sequence[int], num_prompts: int) -> str:
    """The list of --concurrency where none is given: `values`, as far as the prompts can show them."""
    return ",".join(str(value) for value in dict.fromkeys(min(value, num_prompts) for value in values))


def _values(name: str, text: str) -> tuple[str | int | float | bool, ...]:
    values = tuple(RULES[name].read(part.strip(), flag_of(name)) for part in text.split(","))
    if len(set(values)) != len(values):
        raise ConfigError(f"{flag_of(name)}: expected different values, found {text!r}")
    return values
