"""What a run of the benchmark has found so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from .rounds import Series


@dataclass(slots=True)
class Results:
    """Suites add to it as they go. `values`: by the key of an aim; `failures`: what went wrong, by suite."""

    series: list[Series] = field(default_factory=list)
    values: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
