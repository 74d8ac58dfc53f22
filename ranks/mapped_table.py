"""A table of rows in a checkpoint's files, mapped into memory: only rows that are asked for are read."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
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
    """Rows [num_rows, D] in one tensor, or in shards one after the other. Its files stay open as long as it lives."""

    def __init__(self, entries: Sequence[TensorEntry]) -> None:
        """Raises ModelError for a file that cannot be mapped."""
        # Each file once: a mapping keeps a descriptor, and a published table has 512 shards in some dozens of files.
        mappings = {file: _map(file) for file in {entry.file for entry in entries}}
        self._width = entries[0].shape[1]
        self._shards = [_Shard.of(entry, mappings[entry.file]) for entry in entries]
        self._ends = np.cumsum([len(shard.stored) for shard in self._shards])

    def rows(self, row_ids: NDArray[np.int64]) -> torch.Tensor:
        """I64 [N] -> FP32 [N, D], exact."""
        shard_ids = np.searchsorted(self._ends, row_ids, side="right")
        found = np.empty((len(row_ids), self._width), dtype=np.float32)
        for shard_id in np.unique(shard_ids).tolist():
            is_here, shard = shard_ids == shard_id, self._shards[shard_id]
            found[is_here] = shard.rows(row_ids[is_here] - (self._ends[shard_id] - len(shard.stored)))
        return torch.from_numpy(found)


@dataclass(frozen=True, slots=True)
class _Shard:
    """stored [rows, D] lies in the file, at any offset; it holds values of `dtype`, 16-bit floats as their bits."""

    stored: NDArray[Any]
    dtype: str

    @classmethod
    def of(cls, entry: TensorEntry, mapping: mmap.mmap) -> _Shard:
        flat = np.frombuffer(mapping, BITS[entry.dtype], count=math.prod(entry.shape), offset=entry.offset)
        return cls(flat.reshape(entry.shape), DTYPES[entry.dtype])

    def rows(self, row_ids: NDArray[np.int64]) -> NDArray[Any]:
        bits = self.stored[row_ids]
        return bits if self.dtype == "float32" else _C.widen(bits, self.dtype)


def _map(file: Path) -> mmap.mmap:
    try:
        with file.open("rb") as stream:
            mapping = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(
            f"cannot map {file} into memory: {error.strerror or error}. Check that it can be read, and the limits on "
            "address space and open files (ulimit -v, ulimit -n)"
        ) from None
    # Rows lie far apart: reading ahead would fetch a hundred times what is asked for.
    mapping.madvise(mmap.MADV_RANDOM)
    return mapping
