"""The extension leafsum._C and the folder-to-package map; everything else is in pyproject.toml."""

from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_py import build_py

KERNELS = Path("csrc/cpu")
FOLDERS = [
    "runtime",
    "runtime.bench",
    "runtime.commands",
    "runtime.receipts",
    "ranks",
    "ranks.blocks",
    "ranks.configs",
    "ranks.models",
    "collectives",
]
NOT_IN_WHEEL = {"setup"}
# every operation rounds once, where docs/numerics.md says: no contraction, and never fast-math
COMPILE_FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra"]


class BuildPy(build_py):
    """Builds the modules of the root package without setup.py, which lies beside them."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        found = super().find_package_modules(package, package_dir)
        return [entry for entry in found if not (package == "leafsum" and entry[1] in NOT_IN_WHEEL)]


ParallelCompile(default=0).install()  # 0: as many compilers at once as there are cores
setup(
    packages=["leafsum", *(f"leafsum.{folder}" for folder in FOLDERS)],
    package_dir={"leafsum": ".", **{f"leafsum.{folder}": folder.replace(".", "/") for folder in FOLDERS}},
    package_data={"leafsum": ["py.typed", "_C.pyi"]},
    ext_modules=[
        Pybind11Extension(
            "leafsum._C",
            sorted(str(path) for path in KERNELS.glob("*.cpp")),
            depends=sorted(str(path) for pattern in ("*.hpp", "*.inc") for path in KERNELS.glob(pattern)),
            cxx_std=17,
            extra_compile_args=COMPILE_FLAGS,
        )
    ],
    cmdclass={"build_py": BuildPy},
)
