"""A fresh program that says when its first token is there: `python -m leafsum.runtime.bench.first_token`."""

from __future__ import annotations

import sys

from ..pool import WorkerPool
from ..sampling import SamplingParams
from ..witness import Progress


def main() -> None:
    def on_progress(progress: Progress) -> None:
        if progress.output_tokens:
            sys.stdout.write("token\n")
            sys.stdout.flush()

    with WorkerPool(model="tiny", tp=1) as pool:
        pool.generate(
            ["Adding the same numbers in the same order."], SamplingParams(max_tokens=1), on_progress=on_progress
        )


if __name__ == "__main__":
    main()
