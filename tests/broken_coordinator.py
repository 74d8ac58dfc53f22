"""A coordinator whose ranks are `broken_worker`s: `python -m broken_coordinator`, with tests/ on PYTHONPATH."""

from typing import Any

from leafsum.runtime import coordinator, launcher
from leafsum.runtime.child import Child


def broken_child(role: str, _module: str, *arguments: Any) -> Child:
    return Child(role, "broken_worker", *arguments)


if __name__ == "__main__":
    launcher.Child = broken_child  # type: ignore[assignment, misc]
    coordinator.main()
