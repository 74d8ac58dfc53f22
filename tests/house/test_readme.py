"""README.md is true: its commands, run as printed, print what stands below them."""

import re
import shlex
import subprocess
import sys

import pytest
from house.checkout import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
EXAMPLES = [
    tuple(example.split("\n", maxsplit=1))
    for language, block in BLOCKS
    if not language
    for example in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=240, stdin=subprocess.DEVNULL
    )


@pytest.mark.parametrize(("command", "expected"), EXAMPLES)
def test_a_command_prints_what_stands_below_it(command, expected) -> None:
    launcher, *arguments = shlex.split(command)
    assert launcher == "./launch.sh"
    ended = run("-m", "leafsum", *arguments)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == expected


@pytest.mark.parametrize(("index", "num_lines"), [(0, 3), (1, 2)])
def test_an_embedding_example_runs(index, num_lines) -> None:
    examples = [block for language, block in BLOCKS if language == "python"]
    assert len(examples) == 2
    ended = run("-c", examples[index])
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(ended.stdout.splitlines()) == num_lines


def test_every_page_that_is_linked_exists() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text())]
    assert links
    assert [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()] == []
