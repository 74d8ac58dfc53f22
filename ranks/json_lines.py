"""Questions and answers as lines of JSON: how a program that measures talks with the process that is measured."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def serve_lines(start: Callable[[], Answer]) -> None:
    """Starts, then answers every line of standard input with a line on standard output, until the asker is gone.

    Standard output belongs to the answers: what anybody else prints goes to standard error.
    """
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        answer = start()
        for line in sys.stdin:
            answers.write(json.dumps(answer(json.loads(line))) + "\n")
            answers.flush()
