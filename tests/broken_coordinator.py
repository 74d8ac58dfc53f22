"""A coordinator whose ranks are `broken_worker`s: `python -m broken_coordinator`, with tests/ on PYTHONPATH."""

from pathlib import Path
from typing import Any

import pytest
from leafsum.runtime import conversation, coordinator, launcher
from leafsum.runtime.child import Child


def break_ranks(monkeypatch: pytest.MonkeyPatch, defect: str) -> None:
    """The pools that are started from now on have ranks with this defect, but a single rank."""
    monkeypatch.setenv("BROKEN", defect)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parent))
    monkeypatch.setattr(
        conversation, "Child", lambda role, _module, *arguments: Child(role, "broken_coordinator", *arguments)
    )


def broken_child(role: str, _module: str, *arguments: Any) -> Child:
    return Child(role, "broken_worker", *arguments)


if __name__ == "__main__":
    launcher.Child = broken_child  # type: ignore[assignment, misc]
    coordinator.main()
