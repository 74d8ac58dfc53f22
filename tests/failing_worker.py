"""A rank process whose loading fails in an awkward way: `FAILS=NAME python -m failing_worker`, tests/ on PYTHONPATH."""

import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from leafsum.errors import ModelError
from leafsum.ranks import worker


class SpeechlessError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def fail(error: Exception) -> NoReturn:
    raise error


FAILURES: dict[str, Callable[[], Any]] = {
    "exit": lambda: sys.exit(3),
    "speechless": lambda: fail(SpeechlessError()),
    "no characters": lambda: fail(ModelError("model-\udcff.safetensors")),
    "endless": lambda: fail(ModelError("x" * (1 << 26))),
}

if __name__ == "__main__":
    worker.Worker._load = lambda _self, _setup: FAILURES[os.environ["FAILS"]]()  # type: ignore[assignment, method-assign]
    worker.main()
