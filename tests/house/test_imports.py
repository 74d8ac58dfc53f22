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
from leafsum import collectives, errors
from packaging.requirements import Requirement

TORCH_FREE_RANKS = (
    "checkpoint", "configs", "control", "footprint", "journal", "json_fields", "json_lines", "logs", "machine",
    "messages", "ngram_tables", "numerics", "rope", "sizes", "spec", "tiny", "user_cache",
)  # fmt: skip
TORCH_FREE_COLLECTIVES = ("control_names", "placement", "tree")

MODULE_OF = {"pyzmq": "zmq"}
"""The module of a package that is named otherwise."""

ARROWS = {
    "collectives": ("errors", "_C", "collectives"),
    "ranks": ("errors", "_C", "collectives", "ranks"),
    "runtime": (
        "errors",
        "_C",
        "runtime",
        *(f"ranks.{module}" for module in TORCH_FREE_RANKS),
        *(f"collectives.{module}" for module in TORCH_FREE_COLLECTIVES),
    ),
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
    names = [".".join(path.with_suffix("").parts) for path in package_modules() if path.parts[0] == "runtime"]
    assert "runtime.commands.needs" in names
    assert "torch" not in modules_loaded_by("".join(f"import leafsum.{name}\n" for name in names))


def test_what_the_coordinator_may_import_of_other_folders_is_free_of_torch() -> None:
    names = [f"ranks.{name}" for name in TORCH_FREE_RANKS]
    names += [f"collectives.{name}" for name in TORCH_FREE_COLLECTIVES]
    assert "torch" not in modules_loaded_by("".join(f"import leafsum.{name}\n" for name in names))


def test_settings_and_the_spec_need_no_numpy() -> None:
    loaded = modules_loaded_by("import leafsum.runtime.settings, leafsum.ranks.spec")
    assert loaded & {"numpy", "torch"} == set()


def test_help_imports_no_torch() -> None:
    statement = "from leafsum.runtime.commands.main import run\nassert run(['--help']) == 0"
    assert modules_loaded_by(statement) & {"torch", "numpy", "rich", "zmq"} == set()


@pytest.mark.parametrize("folder", PACKAGE_FOLDERS)
def test_a_folder_imported_by_itself_fails_at_once(folder) -> None:
    ended = run_python(f"import {folder}", cwd=ROOT)
    assert ended.returncode == 1
    assert "ImportError: attempted relative import beyond top-level package" in ended.stderr


@pytest.mark.parametrize("package", [leafsum, collectives])
def test_every_exported_name_is_there(package) -> None:
    assert sorted(package.__all__) == package.__all__
    assert dir(package) == package.__all__
    for name in package.__all__:
        assert getattr(package, name).__name__ == name


@pytest.mark.parametrize("package", [leafsum, collectives])
def test_an_unknown_name_is_an_attribute_error(package) -> None:
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'Workerpool'"):
        package.Workerpool  # noqa: B018 (the look-up is what is tested)


def error_classes() -> dict[str, type[BaseException]]:
    return {name: value for name, value in vars(errors).items() if isinstance(value, type)}


def test_every_error_is_exported() -> None:
    assert set(error_classes()) == {name for name in leafsum.__all__ if name in vars(errors)}


def test_every_error_is_in_the_one_tree() -> None:
    """No class of the package outside errors.py has one of its errors as a base."""
    strays = [
        f"{path}: {node.name}"
        for path in package_modules()
        if path.name != "errors.py"
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.ClassDef)
        and {ast.unparse(base).split(".")[-1] for base in node.bases} & set(error_classes())
    ]
    assert strays == []


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
