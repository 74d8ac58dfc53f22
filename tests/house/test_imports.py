"""Who may import whom (docs/architecture.md), what an import costs, and that the lists of names are true."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

import leafsum
import pytest
from house.checkout import PACKAGE_FOLDERS, ROOT, package_modules
from leafsum import errors
from packaging.requirements import Requirement

TORCH_FREE_RANKS = ("messages", "control", "spec", "checkpoint", "json_fields", "rope", "sizes", "tiny")
USES_COLLECTIVES = {"inspect_model"}
"""Modules of runtime that need collectives, and so torch: their command imports them when it runs."""

MODULE_OF = {"pyzmq": "zmq"}
"""The module of a package that is named otherwise."""

ARROWS = {
    "collectives": ("errors", "_C", "collectives"),
    "ranks": ("errors", "_C", "collectives", "ranks"),
    "runtime": ("errors", "_C", "collectives", "runtime", *(f"ranks.{module}" for module in TORCH_FREE_RANKS)),
}


def test_imports_follow_the_arrows() -> None:
    against = [
        f"{path} imports {name}"
        for path in package_modules()
        if len(path.parts) > 1
        for name in leafsum_imports(path)
        if not any(f"{name}.".startswith(f"{allowed}.") for allowed in ARROWS[path.parts[0]])
    ]
    assert against == []


def leafsum_imports(path: Path) -> Iterator[str]:
    """What a module imports of leafsum, as dotted names without `leafsum.`; the last part is the imported name."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "leafsum"):
            base = path.parts[: len(path.parts) - node.level] if node.level else ()
            module = (node.module or "").removeprefix("leafsum" if not node.level else "").strip(".")
            yield from (".".join([*base, *module.split(".") * bool(module), alias.name]) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name.removeprefix("leafsum.") for name in node.names if name.name.startswith("leafsum"))


def test_imports_across_folders_are_relative() -> None:
    names = [(path, name) for path in package_modules() for name in absolute_imports(path)]
    assert [(path, name) for path, name in names if name.split(".")[0] in ("leafsum", *PACKAGE_FOLDERS)] == []


def absolute_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def test_what_is_imported_is_what_is_asked_for() -> None:
    """Third-party packages: each one imported is a dependency in pyproject.toml, and each dependency is imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked_for = {MODULE_OF.get(name, name) for name in (Requirement(text).name for text in project["dependencies"])}
    imported = {name.split(".")[0] for path in package_modules() for name in absolute_imports(path)}
    assert imported - sys.stdlib_module_names == asked_for


def modules_loaded_by(statement: str) -> set[str]:
    """The top-level modules in a fresh interpreter after one statement."""
    code = f"{statement}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    ended = run_python(code)
    assert ended.returncode == 0, ended.stderr
    return set(ended.stdout.splitlines()[-1].split())


def run_python(code: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False, timeout=120
    )


def test_importing_leafsum_loads_nothing_but_the_standard_library() -> None:
    assert (
        modules_loaded_by("import leafsum") & {"torch", "numpy", "zmq", "msgspec", "click", "rich", "safetensors"}
        == set()
    )


def test_the_coordinators_side_imports_no_torch() -> None:
    names = {path.stem for path in package_modules() if path.parts[0] == "runtime"} - {"__init__"} - USES_COLLECTIVES
    assert "torch" not in modules_loaded_by("".join(f"import leafsum.runtime.{name}\n" for name in sorted(names)))


@pytest.mark.parametrize("module", [name for name in TORCH_FREE_RANKS if (ROOT / "ranks" / f"{name}.py").exists()])
def test_what_the_coordinator_may_import_of_ranks_is_free_of_torch(module) -> None:
    loaded = modules_loaded_by(f"import leafsum.ranks.{module}")
    assert "torch" not in loaded


def test_help_imports_no_torch() -> None:
    statement = (
        "import sys\nfrom leafsum.runtime.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass"
    )
    assert modules_loaded_by(statement) & {"torch", "numpy", "rich", "zmq"} == set()


@pytest.mark.parametrize("folder", PACKAGE_FOLDERS)
def test_a_folder_imported_by_itself_fails_at_once(folder) -> None:
    ended = run_python(f"import {folder}", cwd=ROOT)
    assert ended.returncode == 1
    assert "ImportError: attempted relative import beyond top-level package" in ended.stderr


def test_every_exported_name_is_there() -> None:
    assert sorted(leafsum.__all__) == leafsum.__all__
    assert dir(leafsum) == leafsum.__all__
    for name in leafsum.__all__:
        assert getattr(leafsum, name).__name__ == name


@pytest.mark.parametrize("name", ["Workerpool", "runtime_pool"])
def test_an_unknown_name_is_an_attribute_error(name) -> None:
    with pytest.raises(AttributeError, match=f"module 'leafsum' has no attribute '{name}'"):
        getattr(leafsum, name)


def error_classes() -> dict[str, type[BaseException]]:
    return {name: value for name, value in vars(errors).items() if isinstance(value, type)}


def test_every_error_is_exported() -> None:
    assert set(error_classes()) == {name for name in leafsum.__all__ if name in vars(errors)}


def test_the_error_tree_is_drawn_as_it_is() -> None:
    drawn: dict[str, str] = {}
    ancestors: list[str] = []
    for indent, name in re.findall(
        r"^([ │├└─]*)([A-Z]\w+)(?:\s{2,}.*)?$", cleandoc(errors.__doc__ or ""), re.MULTILINE
    ):
        depth = len(indent) // 4
        ancestors[depth:] = [name]
        drawn[name] = ancestors[depth - 1] if depth else "Exception"
    assert drawn == {name: kind.__bases__[0].__name__ for name, kind in error_classes().items()}
