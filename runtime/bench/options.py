"""What one run of the benchmark was asked for."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import ConfigError
from ..settings import Settings

SUITES = ("kernels", "decode", "prompt", "waiting", "transport", "startup")
"""In the order in which they run."""

FAMILIES = ("qwen3_moe", "qwen4_exp")
"""Of the models that the command can make, in the order in which they are measured."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A linear layer: columns in (K) and out (N)."""

    num_inputs: int
    num_outputs: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """'2560x12288'. Raises ConfigError."""
        match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text)
        if match is None:
            raise ConfigError(f"--shape: expected INxOUT, such as 2560x12288, found {text!r}")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.num_inputs}x{self.num_outputs}"


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model to measure. `folder` None: the one that the command makes of the family `name`."""

    name: str
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Sizes of the work, as `leafsum bench --help` tells them."""

    settings: Settings
    models: tuple[BenchModel, ...]
    shapes: tuple[Shape, ...]
    num_rows: int
    rank_counts: tuple[int, ...]
    with_transformers: bool
    prompt_tokens: int
    new_tokens: int
    num_requests: int
    long_prompt_tokens: int
    gather_bytes: int
    gather_ranks: tuple[int, ...]
    gather_calls: int
    read_bytes: int = 1 << 28
    wait_s: float = 2.0

    def pool_settings(self, folder: Path, tp: int) -> Settings:
        """Of a pool that is measured. It does not recover: that would hide in a figure, where an error is the truth."""
        return replace(self.settings, model=str(folder), tp=tp, concurrency=self.num_requests, recover="never")


def parse_counts(text: str, flag: str, most: int) -> tuple[int, ...]:
    """'1,2,4' -> (1, 2, 4). Raises ConfigError."""
    entries = text.split(",")
    counts = [int(entry) if re.fullmatch(r"[0-9]{1,6}", entry) else 0 for entry in entries]
    for entry, count in zip(entries, counts, strict=True):
        if not 1 <= count <= most:
            raise ConfigError(f"{flag}: expected whole numbers of 1 to {most} with commas between, found {entry!r}")
    if len(set(counts)) < len(counts):
        raise ConfigError(f"{flag}: expected every number once, found {text!r}")
    return tuple(counts)
