"""What a careless sum would treat otherwise: counted, so that a receipt can show that its prompts met it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

_SMALLEST_NORMAL_BITS = np.uint32(0x00800000)
_MAGNITUDE_BITS = np.uint32(0x7FFFFFFF)
_NEGATIVE_ZERO_BITS = np.uint32(0x80000000)


@dataclass(slots=True)
class HazardCounts:
    """Counts of one rank since it started.

    router_ties: rows in which an expert was left out whose probability equals that of a chosen one on another rank
    (the lower id wins). subnormals, negative_zeros: elements of the slot rows that this rank owns; flush-to-zero would
    lose the first, an order that starts from a row instead of +0.0 would keep the second.
    """

    router_ties: int = 0
    subnormals: int = 0
    negative_zeros: int = 0

    def count_rows(self, rows: NDArray[np.float32]) -> None:
        """rows of any shape, owned by this rank."""
        bits = rows.view(np.uint32)
        magnitudes = bits & _MAGNITUDE_BITS
        self.subnormals += int(np.count_nonzero((magnitudes > 0) & (magnitudes < _SMALLEST_NORMAL_BITS)))
        self.negative_zeros += int(np.count_nonzero(bits == _NEGATIVE_ZERO_BITS))

    def count_ties(
        self, probabilities: NDArray[np.float32], chosen_ids: NDArray[np.int32], owners: NDArray[np.int32]
    ) -> None:
        """probabilities [M, E]; chosen_ids [M, K]; owners [E], the rank of each id."""
        rows = np.arange(len(probabilities))[:, None]
        chosen = np.take_along_axis(probabilities, chosen_ids, axis=1)
        last = chosen.argmin(axis=1)[:, None]
        is_left_out = np.ones(probabilities.shape, dtype=bool)
        is_left_out[rows, chosen_ids] = False
        on_other_rank = owners[None, :] != owners[np.take_along_axis(chosen_ids, last, axis=1)]
        is_tie = is_left_out & on_other_rank & (probabilities == np.take_along_axis(chosen, last, axis=1))
        self.router_ties += int(np.count_nonzero(is_tie.any(axis=1)))

    def as_dict(self) -> dict[str, int]:
        return asdict(self)
