"""The house rules that no linter knows: sizes of files and functions, and that the project speaks of itself alone."""

import ast
import re
from collections.abc import Iterator

from house.checkout import ROOT, package_modules, project_files

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PROJECT_BYTES = 40 * 2**20
CODE_SUFFIXES = {".py", ".pyi", ".cpp", ".hpp", ".inc", ".h", ".cu", ".sh"}


def test_no_source_file_is_longer_than_400_lines() -> None:
    lengths = {
        str(path): len((ROOT / path).read_text().splitlines())
        for path in project_files()
        if path.suffix in CODE_SUFFIXES
    }
    assert {path: length for path, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_no_function_is_longer_than_60_lines() -> None:
    lengths = {
        f"{path}:{function.name}": body_lines(function)
        for path in package_modules()
        for function in functions_of(ast.parse((ROOT / path).read_text()))
    }
    assert {function: length for function, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


def functions_of(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, without the docstring's."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function) is None:
        return lines
    docstring = function.body[0]
    return lines - ((docstring.end_lineno or 0) - docstring.lineno + 1)


def test_the_project_is_small() -> None:
    sizes = {path: (ROOT / path).stat().st_size for path in project_files()}
    largest = sorted(sizes, key=lambda path: sizes[path], reverse=True)[:5]
    assert sum(sizes.values()) < MAX_PROJECT_BYTES, f"largest: {', '.join(map(str, largest))}"


def test_no_file_names_a_path_of_one_machine() -> None:
    machine_path = re.compile(r"(?<![\w.])/(?:work|root|home|opt|Users)/\w")
    found = [
        f"{path}:{number}: {line.strip()}"
        for path in project_files()
        for number, line in enumerate((ROOT / path).read_text(errors="replace").splitlines(), start=1)
        if machine_path.search(line)
    ]
    assert found == []


def test_every_section_that_is_cited_exists() -> None:
    page = (ROOT / "docs/numerics.md").read_text()
    citation = re.compile(r"numerics\.md,? sections? (\d+(?:(?:, | and )\d+)*)")
    cited = [
        (str(path), number)
        for path in project_files()
        for numbers in citation.findall((ROOT / path).read_text(errors="replace"))
        for number in re.findall(r"\d+", numbers)
    ]
    assert cited, "nothing cites the page: is the pattern still right?"
    assert [(path, number) for path, number in cited if f"\n## {number}. " not in page] == []
