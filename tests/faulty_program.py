"""The command line with processes that meet with faults on order: `FAULTS=FOLDER python -m faulty_program ARGS`."""

from __future__ import annotations

import os
from typing import Any

from faulty import search_path
from leafsum.runtime import conversation
from leafsum.runtime.child import Child
from leafsum.runtime.commands.main import main


def faulty_coordinator(role: str, _module: str, *arguments: Any) -> Child:
    return Child(role, "faulty_coordinator", *arguments)


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = search_path()
    conversation.Child = faulty_coordinator  # type: ignore[assignment, misc]
    main()
