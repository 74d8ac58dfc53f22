"""launch.sh, with a stand-in for Python that logs what it is asked to install instead of installing it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from house.checkout import ROOT

STAND_IN = """#!/bin/bash
# Answers for python: `-m venv` makes a folder with this script as python, `-m pip` logs; all else goes to the real one.
case "$*" in
    *"print(sys.executable)"*) echo "$0" ;;
    *"-m venv"*)
        echo "venv" >>"$LAUNCH_LOG"
        target="${@: -1}"
        rm -rf "$target" && mkdir -p "$target/bin" && cp "$0" "$target/bin/python"
        ;;
    *"-m pip"*"--editable"*)
        echo "pip editable" >>"$LAUNCH_LOG"
        checkout="${@: -1}"
        touch "$checkout/_C.stand-in.so"
        printf '#!/bin/sh\\npwd\\nprintf "%%s\\\\n" "$@"\\nexit 3\\n' >"$checkout/.venv/bin/leafsum"
        chmod +x "$checkout/.venv/bin/leafsum"
        ;;
    *"-m pytest"*) printf '%s\\n' "$@" ;;
    *"-m pip"*)
        echo "pip lock" >>"$LAUNCH_LOG"
        sleep "${LAUNCH_SLEEP_S:-0}"
        exit "${LAUNCH_PIP_STATUS:-0}"
        ;;
    *) exec "$REAL_PYTHON" "$@" ;;
esac
"""


@dataclass(frozen=True, slots=True)
class Checkout:
    """A checkout of launch.sh and what it reads, in a folder with a space and a name that is no identifier."""

    root: Path
    log: Path
    env: dict[str, str]

    def start(
        self, *arguments: str, script: Path | None = None, cwd: Path | None = None, **env: str
    ) -> subprocess.Popen:
        return subprocess.Popen(
            [script or self.root / "launch.sh", *arguments],
            cwd=cwd,
            env=self.env | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **options)
        stdout, stderr = process.communicate(timeout=60)
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)

    def logged(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    root = tmp_path / "a b" / "leafsum-main"
    (root / "csrc" / "cpu").mkdir(parents=True)
    (root / "csrc" / "cpu" / "module.cpp").write_text("// one\n")
    for name in ("launch.sh", "requirements.lock", "setup.py", "pyproject.toml"):
        shutil.copy2(ROOT / name, root / name)
    stand_in = tmp_path / "python-stand-in"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    log = tmp_path / "log"
    env = os.environ | {"PYTHON": str(stand_in), "REAL_PYTHON": sys.executable, "LAUNCH_LOG": str(log)}
    return Checkout(root, log, env)


def test_the_head_comment_is_the_manual(checkout) -> None:
    ended = checkout.run("manual")
    assert ended.returncode == 0
    assert ended.stdout.startswith("NAME\n    launch.sh - make leafsum's environment once")
    assert ended.stdout.rstrip().endswith("./launch.sh setup")
    assert checkout.logged() == []


def test_it_sets_up_once_and_passes_everything_on(checkout, tmp_path) -> None:
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    first = checkout.run("generate", "--prompt", "two words", cwd=elsewhere)
    assert first.returncode == 3, first.stderr
    assert first.stdout.splitlines() == [str(elsewhere), "generate", "--prompt", "two words"]
    second = checkout.run("inspect")
    assert second.stderr == ""
    assert checkout.logged() == ["venv", "pip lock", "pip editable"]


def test_no_arguments_are_the_demonstration(checkout, tmp_path) -> None:
    assert checkout.run(cwd=tmp_path).stdout.splitlines() == [str(tmp_path), "demo"]


def test_the_checks_end_with_pytest_on_all_cores_and_pass_arguments_on(checkout) -> None:
    checkout.run("setup")
    (checkout.root / "tests").mkdir()
    for tool in ("ruff", "mypy", "clang-format"):
        (checkout.root / ".venv/bin" / tool).symlink_to(shutil.which("true") or "")
    ended = checkout.run("test", "-k", "two words", "tests/house/test_launch.py", "-n", "0")
    assert ended.returncode == 0, ended.stderr
    words = ended.stdout.splitlines()
    assert words[:2] == ["-m", "pytest"]
    assert words[6:12] == ["-n", "auto", "--maxprocesses", "8", "--dist", "worksteal"]
    assert words[12:] == ["-k", "two words", "house/test_launch.py", "-n", "0"], "after ours, so that they win"


def test_it_works_through_a_symbolic_link(checkout, tmp_path) -> None:
    link = tmp_path / "leafsum"
    link.symlink_to(checkout.root / "launch.sh")
    assert checkout.run("doctor", script=link, cwd=tmp_path).stdout.splitlines() == [str(tmp_path), "doctor"]
    assert (checkout.root / ".venv").is_dir()


def test_two_at_once_set_up_once_and_the_one_that_waits_says_so(checkout) -> None:
    processes = [checkout.start("setup", LAUNCH_SLEEP_S="1") for _ in range(2)]
    told = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert checkout.logged() == ["venv", "pip lock", "pip editable"]
    waits = f"leafsum: another launch.sh is at work in {checkout.root}; waiting for it\n"
    assert sorted(text == waits for text in told) == [False, True]


def append(path: Path) -> None:
    path.write_text(path.read_text() + "# changed\n")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(lambda root: append(root / "requirements.lock"), ["pip lock", "pip editable"], id="lock"),
        pytest.param(lambda root: append(root / "csrc/cpu/module.cpp"), ["pip editable"], id="csrc"),
        pytest.param(lambda root: (root / "csrc/cpu/new.cpp").touch(), ["pip editable"], id="new source"),
        pytest.param(lambda root: append(root / "setup.py"), ["pip editable"], id="setup.py"),
        pytest.param(lambda root: (root / "_C.stand-in.so").unlink(), ["pip editable"], id="extension gone"),
        pytest.param(lambda root: shutil.rmtree(root / ".venv"), ["venv", "pip lock", "pip editable"], id="no .venv"),
    ],
)
def test_a_change_redoes_what_it_touches(checkout, change: Callable[[Path], None], expected) -> None:
    checkout.run("setup")
    before = len(checkout.logged())
    change(checkout.root)
    assert checkout.run("setup").returncode == 0
    assert checkout.logged()[before:] == expected


def test_a_moved_checkout_starts_afresh(checkout, tmp_path) -> None:
    checkout.run("setup")
    moved = Checkout(checkout.root.rename(tmp_path / "moved"), checkout.log, checkout.env)
    assert moved.run("setup").returncode == 0
    assert moved.logged() == ["venv", "pip lock", "pip editable"] * 2


def test_a_set_up_that_failed_starts_afresh(checkout) -> None:
    assert checkout.run("generate", LAUNCH_PIP_STATUS="7").returncode == 7
    assert checkout.run("setup").returncode == 0
    assert checkout.logged() == ["venv", "pip lock", "venv", "pip lock", "pip editable"]


def test_a_change_that_failed_starts_afresh(checkout) -> None:
    checkout.run("setup")
    append(checkout.root / "requirements.lock")
    assert checkout.run("setup", LAUNCH_PIP_STATUS="7").returncode == 7
    before = len(checkout.logged())
    assert checkout.run("setup").returncode == 0
    assert checkout.logged()[before:] == ["venv", "pip lock", "pip editable"]


def test_a_missing_python_is_named(checkout) -> None:
    ended = checkout.run("setup", PYTHON="/nowhere/python")
    assert ended.returncode == 69
    assert ended.stderr == "leafsum: PYTHON=/nowhere/python is no Python of version 3.11 or newer\n"


def bare_path(folder: Path, *tools: str) -> str:
    """A PATH with these tools alone."""
    folder.mkdir()
    for tool in tools:
        (folder / tool).symlink_to(shutil.which(tool) or tool)
    return str(folder)


def test_a_missing_flock_is_named_with_its_package(checkout, tmp_path) -> None:
    ended = checkout.run("setup", PATH=bare_path(tmp_path / "tools", "bash", "cat", "dirname", "readlink"))
    assert (ended.returncode, ended.stderr) == (69, "leafsum: flock is missing here: install util-linux\n")
    assert checkout.logged() == []


def test_no_python_at_all_is_told_with_the_packages(checkout, tmp_path) -> None:
    tools = bare_path(tmp_path / "tools", "bash", "cat", "dirname", "flock", "head", "readlink")
    ended = checkout.run("setup", PYTHON="", PATH=tools)
    assert ended.returncode == 69
    assert "no Python 3.11 or newer on PATH: install python3 (python3.11 or newer), python3-venv" in ended.stderr


def test_a_missing_compiler_is_named_with_its_package(checkout) -> None:
    ended = checkout.run("setup", CXX="no-such-compiler --flag")
    assert ended.returncode == 69
    assert "the C++ compiler no-such-compiler: install g++" in ended.stderr
    assert checkout.logged() == []


def test_missing_venv_and_headers_are_named_with_their_packages(checkout, tmp_path) -> None:
    hide = "import sys, sysconfig; sys.modules['ensurepip'] = None; sysconfig.get_path = lambda name: '/nowhere'"
    bare = tmp_path / "bare-python"
    bare.write_text(
        '#!/bin/bash\n[[ $* == "-I -c import sys; print(sys.executable)" ]] && { echo "$0"; exit; }\n'
        f'[[ $* == "-I -" ]] && exec {sys.executable!r} -I -c "{hide}; exec(sys.stdin.read())"\n'
        f'exec {sys.executable!r} "$@"\n'
    )
    bare.chmod(0o755)
    ended = checkout.run("setup", PYTHON=str(bare))
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    assert ended.returncode == 69
    assert f"install {version}-venv" in ended.stderr
    assert f"install {version}-dev" in ended.stderr
