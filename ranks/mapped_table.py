"""A table of rows in a checkpoint's files, mapped into memory: only rows that are asked for are read."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import _C
from ..errors import ModelError
from .checkpoint import DTYPES, TensorEntry

BITS: dict[str, Any] = {"F32": np.float32, "BF16": np.uint16, "F16": np.uint16}
"""Files are little-endian, and so is every machine that torch supports."""


class MappedTable:
    """Rows [num_rows, D] in one tensor, or in several one after the other. The files stay open as long as it lives."""

    def __init__(self, entries: Sequence[TensorEntry]) -> None:
        """Raises ModelError for a file that cannot be mapped."""
        if len({(entry.dtype, entry.shape[1]) for entry in entries}) > 1:
            raise ModelError(f"expected the parts of a table to be of one type and width, found others: {entries}")
        self._dtype = DTYPES[entries[0].dtype]
        self._parts = [_map(entry) for entry in entries]
        self._ends = np.cumsum([len(part) for part in self._parts])

    def rows(self, row_ids: NDArray[np.int64]) -> torch.Tensor:
        """I64 [N] -> FP32 [N, D], exact."""
        part_ids = np.searchsorted(self._ends, row_ids, side="right")
        found = np.empty((len(row_ids), self._parts[0].shape[1]), dtype=self._parts[0].dtype)
        for part_id in np.unique(part_ids).tolist():
            is_here = part_ids == part_id
            first = self._ends[part_id] - len(self._parts[part_id])
            found[is_here] = self._parts[part_id][row_ids[is_here] - first]
        return torch.from_numpy(found if self._dtype == "float32" else _C.widen(found, self._dtype))


def _map(entry: TensorEntry) -> NDArray[Any]:
    try:
        with entry.file.open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"cannot map {entry.file} into memory: {error.strerror or error}") from None
    # Rows lie far apart: reading ahead would fetch a hundred times what is asked for.
    mapped.madvise(mmap.MADV_RANDOM)
    num_values = int(np.prod(entry.shape))
    values: NDArray[Any] = np.frombuffer(mapped, dtype=BITS[entry.dtype], count=num_values, offset=entry.offset)
    return values.reshape(entry.shape)
