"""Reading weights: the named slices of a checkpoint that a rank owns, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import ModelError
from . import ops
from .checkpoint import DTYPES, Checkpoint, TensorEntry
from .sizes import shard_names

Part = tuple[int, int]


class WeightReader:
    """Context manager over a checkpoint's files. `bytes_read` and `names_read` say what a rank has taken."""

    def __init__(self, checkpoint: Checkpoint, dtype: str) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.bytes_read = 0
        self.names_read: list[str] = []
        self._files: dict[str, Any] = {}
        self._open_files = ExitStack()

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._files.clear()
        self._open_files.close()

    def read(self, name: str, rows: Part | None = None, columns: Part | None = None) -> torch.Tensor:
        """As stored. `rows` (first, stop) cuts the first axis, `columns` the second; only those bytes are read."""
        entry = self.checkpoint.entries[name]
        tensor = self._cut(name, rows, columns)
        if tensor.dtype != ops.TORCH_DTYPES[DTYPES[entry.dtype]]:
            raise ModelError(f"tensor {name} in {entry.file} is {tensor.dtype}, its header says {entry.dtype}")
        return tensor

    def integers(self, name: str) -> tuple[int, ...]:
        """A stored buffer of whole numbers."""
        return tuple(self._cut(name).flatten().tolist())

    def fp32(self, name: str, rows: Part | None = None) -> torch.Tensor:
        """Norm weights and biases: the exact FP32 values."""
        return ops.widen(self.read(name, rows))

    def linear(self, name: str, rows: Part | None = None, columns: Part | None = None) -> torch.Tensor:
        """The weight of a linear, rounded once to the compute dtype. Raises ModelError where that overflows."""
        return self.rounded(name, self.read(name, rows, columns))

    def rounded(self, name: str, stored: torch.Tensor) -> torch.Tensor:
        weight = ops.narrow(stored, self.dtype)
        if self.dtype == "float16" and bool((weight.isinf() & stored.isfinite()).any()):
            raise ModelError(f"tensor {name} holds values beyond float16's range. Use --dtype bfloat16 or float32")
        return weight

    def under(self, prefix: str) -> Weights:
        return Weights(self, prefix)

    def _cut(self, name: str, rows: Part | None = None, columns: Part | None = None) -> torch.Tensor:
        entry = self.checkpoint.entries[name]
        cuts = [slice(None)] * len(entry.shape)
        for axis, part in enumerate((rows, columns)):
            if part is not None:
                cuts[axis] = slice(*part)
        try:
            tensor: torch.Tensor = self._open(str(entry.file)).get_slice(name)[tuple(cuts)].contiguous()
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read tensor {name} from {entry.file}: {error}. Fetch the file again") from None
        if tensor.data_ptr() % tensor.element_size():
            tensor = tensor.clone()  # a header may have any length, and kernels take aligned memory alone
        self.bytes_read += tensor.nbytes
        self.names_read.append(name)
        return tensor

    def _open(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = self._open_files.enter_context(safe_open(file, framework="pt", device="cpu"))
        return self._files[file]


@dataclass(frozen=True, slots=True)
class Weights:
    """A reader's tensors whose names begin with `prefix`, by the rest of their names. A block knows no more of them."""

    reader: WeightReader
    prefix: str

    def under(self, prefix: str) -> Weights:
        return Weights(self.reader, self.prefix + prefix)

    def has(self, name: str) -> bool:
        return self.prefix + name in self.reader.checkpoint.entries

    def fp32(self, name: str, rows: Part | None = None) -> torch.Tensor:
        return self.reader.fp32(self.prefix + name, rows)

    def table(self, name: str) -> list[TensorEntry]:
        """The tensors of a table of rows, in their order: one, or shards."""
        entries = self.reader.checkpoint.entries
        return [entries[each] for each in shard_names(self.prefix + name, entries)]

    def check_integers(self, name: str, expected: Sequence[int]) -> None:
        """Raises ModelError where the file holds this buffer, and it is not what config.json makes of it."""
        if not self.has(name):
            return
        found = self.reader.integers(self.prefix + name)
        for place, (value, number) in enumerate(zip(expected, found, strict=True)):
            if value != number:
                raise ModelError(
                    f"tensor {self.prefix}{name}, place {place}: expected {value}, as config.json has it, found "
                    f"{number}: tables would be read at wrong rows. Fetch config.json and weights of one release"
                )

    def linear(self, name: str, rows: Part | None = None, columns: Part | None = None) -> torch.Tensor:
        return self.reader.linear(self.prefix + name, rows, columns)
