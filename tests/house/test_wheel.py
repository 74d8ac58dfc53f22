"""What is packed: the wheel holds the package and nothing else, the source archive holds what builds it.

The tree is built with a stand-in for the kernels, since only the packing is tested.
"""

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from house.checkout import ROOT, package_modules, project_files
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

STAND_IN = """#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&definition); }
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of the checkout whose C++ files are empty but for the one that defines the module."""
    tree = tmp_path_factory.mktemp("a b") / "some-clone"
    for path in project_files():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, tree / path)
    for path in tree.glob("csrc/cpu/*.cpp"):
        path.write_text(STAND_IN if "PYBIND11_MODULE" in path.read_text() else "")
    return tree


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(build(tree, "build_wheel", tmp_path_factory.mktemp("wheel"))) as archive:
        yield archive


def build(tree: Path, hook: str, folder: Path) -> Path:
    """Runs a hook of the build backend in a copy of the tree, as pip does without build isolation; the file made."""
    code = f"import sys, setuptools.build_meta as backend; backend.{hook}(sys.argv[1])"
    ended = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=tree, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    (made,) = folder.iterdir()
    return made


def test_the_wheel_holds_leafsum_and_its_metadata_only(wheel) -> None:
    folders = {name.split("/")[0] for name in wheel.namelist()}
    assert len(folders) == 2
    assert all(folder == "leafsum" or folder.endswith(".dist-info") for folder in folders)


def test_the_wheel_holds_every_module_and_no_others(wheel) -> None:
    modules = {name for name in wheel.namelist() if name.endswith(".py")}
    assert modules == {f"leafsum/{path.as_posix()}" for path in package_modules()}


def test_the_wheel_holds_the_extension_its_types_and_no_sources(wheel) -> None:
    others = sorted(name for name in wheel.namelist() if not name.endswith(".py") and ".dist-info/" not in name)
    extension = [name for name in others if name.startswith("leafsum/_C.") and name.endswith(".so")]
    assert len(extension) == 1
    assert others == sorted(["leafsum/_C.pyi", "leafsum/py.typed", *extension])


def test_the_wheel_carries_the_licence_and_the_command(wheel) -> None:
    names = {name.partition(".dist-info/")[2]: name for name in wheel.namelist()}
    assert wheel.read(names["licenses/LICENSE"]) == (ROOT / "LICENSE").read_bytes()
    assert b"leafsum = leafsum.runtime.commands.main:main" in wheel.read(names["entry_points.txt"])


def test_the_wheel_is_importable_alone(wheel, tmp_path) -> None:
    wheel.extractall(tmp_path)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import leafsum; print(leafsum.__file__)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ended.stdout.startswith(str(tmp_path / "leafsum"))


def test_the_source_archive_holds_what_builds_it(tree, tmp_path) -> None:
    with tarfile.open(build(tree, "build_sdist", tmp_path)) as archive:
        members = {name.partition("/")[2] for name in archive.getnames()}
    needed = [*project_files("csrc/*"), *package_modules()]
    needed += [Path(name) for name in ("setup.py", "pyproject.toml", "_C.pyi", "py.typed", "LICENSE", "README.md")]
    assert [str(path) for path in needed if path.as_posix() not in members] == []


def test_the_lock_satisfies_what_the_package_asks_for() -> None:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    locked = {canonicalize_name(name): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for text in project["project"]["dependencies"] + project["build-system"]["requires"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), text
