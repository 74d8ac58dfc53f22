"""docs/collectives.md: its example runs as printed, in threads and in processes, and shows what it says."""

from __future__ import annotations

import re
from pathlib import Path

from leafsum.collectives.testing import run_processes

PAGE = Path(__file__).parents[2] / "docs" / "collectives.md"

RUN_PROCESS_PART = """
def in_a_process(mesh, store_path):
    printed = []
    names = {"rank": mesh.rank, "num_ranks": mesh.num_ranks, "store_path": store_path, "print": printed.append}
    exec(PROCESS_PART, globals() | names)
    return printed
"""


def code_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_example_prints_one_hash_for_every_rank_count(capsys):
    exec(code_blocks()[0], {"__name__": "example"})  # noqa: S102 -- the page's own code is what is tested
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["1 ranks", "2 ranks", "3 ranks", "8 ranks"]
    assert len({line.split(":")[1] for line in lines}) == 1


def test_the_example_prints_the_same_hash_in_processes(tmp_path, capsys):
    example, process_part = code_blocks()
    script = tmp_path / "ranks.py"
    script.write_text(f"{example}\nPROCESS_PART = {process_part!r}\n{RUN_PROCESS_PART}")
    exits = run_processes(2, script, "in_a_process", tmp_path, 60.0, store_path=str(tmp_path / "store"))
    exec(example, {"__name__": "example"})  # noqa: S102 -- as above
    in_threads = capsys.readouterr().out.split()[-1]
    assert [rank.stderr for rank in exits] == ["", ""]
    assert [rank.result for rank in exits] == [[in_threads]] * 2
