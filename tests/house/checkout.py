"""The checkout that the tests lie in, as git sees it."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_FOLDERS = ("runtime", "ranks", "collectives")


def project_files(pattern: str = "*") -> list[Path]:
    """The project's files, relative to ROOT: tracked, or new and not ignored. `pattern` is one of git's (`*.py`)."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard", pattern]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted({Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()})


def package_modules() -> list[Path]:
    """Every module of the package leafsum, relative to ROOT."""
    return [path for path in project_files("*.py") if is_of_package(path)]


def is_of_package(path: Path) -> bool:
    return path.parts[0] in PACKAGE_FOLDERS or (len(path.parts) == 1 and path.name != "setup.py")
