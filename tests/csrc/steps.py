"""Calls of kernels that keep memory by slot: which rows of which slots come in a call, and in what order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from oracle.inputs import I32, raw_bits

Piece = tuple[int, int, int]
"""Slot, first position, position behind the last."""
Runs = tuple[I32, I32, I32, I32]
"""row_order, run_slots, run_starts and run_ends, as kernels take them."""


@dataclass(frozen=True, slots=True)
class Step:
    """One call: slots [M] and positions [M] of its rows; a slot's rows ascend, rows of several slots interleave."""

    slots: I32
    positions: I32

    @property
    def runs(self) -> Runs:
        """Slots in the order in which they first have a row."""
        slots = list(dict.fromkeys(self.slots.tolist()))
        rows = [np.flatnonzero(self.slots == slot) for slot in slots]
        ends = np.cumsum([len(of_slot) for of_slot in rows])
        starts = [self.positions[of_slot[0]] for of_slot in rows]
        order = np.concatenate(rows) if rows else np.zeros(0)
        return tuple(np.array(part, dtype=np.int32) for part in (order, slots, starts, ends))  # type: ignore[return-value]


def step(*pieces: Piece) -> Step:
    """The rows of all pieces, interleaved by a shuffle that keeps each slot's order."""
    slots = np.concatenate([np.full(stop - start, slot, dtype=np.int32) for slot, start, stop in pieces])
    shuffled = slots[np.argsort(raw_bits(f"step {pieces}", len(slots)), kind="stable")]
    positions = np.empty_like(shuffled)
    for slot, start, stop in pieces:
        positions[shuffled == slot] = np.arange(start, stop, dtype=np.int32)
    return Step(shuffled, positions)


def whole(lengths: dict[int, int]) -> list[Step]:
    return [step(*((slot, 0, length) for slot, length in lengths.items()))]


def one_by_one(lengths: dict[int, int], first: int = 0) -> list[Step]:
    """Every row in a call of its own, position after position."""
    longest = max(lengths.values())
    return [step((slot, t, t + 1)) for t in range(first, longest) for slot, length in lengths.items() if t < length]


def cut(lengths: dict[int, int], cuts: Iterable[int]) -> list[Step]:
    """Every slot cut at the same positions; slots go on together until they end."""
    edges = [0, *cuts, max(lengths.values())]
    pieces = [
        [(slot, start, min(stop, length)) for slot, length in lengths.items() if start < min(stop, length)]
        for start, stop in pairwise(edges)
    ]
    return [step(*of_call) for of_call in pieces if of_call]


def replay(steps: list[Step], call: Callable[[Step], NDArray], outputs: NDArray) -> NDArray:
    """outputs [slots, T, ...] takes each call's rows at their places."""
    for each in steps:
        outputs[each.slots, each.positions] = call(each)
    return outputs
