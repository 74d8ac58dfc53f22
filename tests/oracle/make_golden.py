"""Writes tests/csrc/golden.json from the oracle: `cd tests && python -m oracle.make_golden`.

The file changes only with the numerics version of docs/numerics.md.
"""

from __future__ import annotations

import json
from pathlib import Path

from oracle.golden import cases, model_records, oracle_result, record

GOLDEN_FILE = Path(__file__).parent.parent / "csrc" / "golden.json"


def main() -> None:
    records = {name: record(oracle_result(case)) for name, case in cases().items()} | model_records()
    lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in records.items()]
    GOLDEN_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
