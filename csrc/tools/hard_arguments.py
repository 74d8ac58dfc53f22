"""Makes csrc/cpu/hard_arguments.cpp, and checks every FP32 argument of every function.

    python csrc/tools/hard_arguments.py write            the tables (about 4 minutes of one core)
    python csrc/tools/hard_arguments.py check exp ...    all 2^32 arguments of the named functions (default: all six)

A check takes 2 to 5 minutes a function. Needs x86-64 (80-bit long double), a C++ compiler and mpmath, which decides
with 300 bits where 80 cannot.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from struct import pack, unpack

import mpmath

CPU = Path(__file__).parent.parent / "cpu"
SOURCES = ["hard_arguments.cpp", "kernels_plain.cpp", "kernels_avx2.cpp", "kernels_avx512.cpp"]
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
FUNCTIONS: dict[str, Callable[[mpmath.mpf], mpmath.mpf]] = {
    "exp": mpmath.exp,
    "log": mpmath.log,
    "sin": mpmath.sin,
    "cos": mpmath.cos,
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
    "softplus": lambda x: mpmath.log1p(mpmath.exp(x)),
}
SYMMETRIC = ("sin", "cos")
HARD_DISTANCE = mpmath.mpf(2) ** -50
PRECISION_BITS = 300
SMALLEST_EXPONENT = -149


def report(text: str, end: str = "\n") -> None:
    sys.stdout.write(text + end)
    sys.stdout.flush()


def value_of_bits(bits: int) -> float:
    return float(unpack("<f", pack("<I", bits))[0])


def round_to_fp32(value: mpmath.mpf) -> tuple[int, mpmath.mpf]:
    """The FP32 bits nearest to value, and value's relative distance from the nearest border between two roundings."""
    if value == 0:
        return 0, mpmath.mpf(1)
    sign, magnitude = (0x80000000 if value < 0 else 0), abs(value)
    exponent = max(int(mpmath.floor(mpmath.log(magnitude, 2))) - 23, SMALLEST_EXPONENT)
    scaled = mpmath.ldexp(magnitude, -exponent)
    below = mpmath.floor(scaled)
    distance = abs(scaled - below - mpmath.mpf("0.5")) / scaled
    nearest = below + (1 if scaled - below > mpmath.mpf("0.5") else 0)
    rounded = float(mpmath.ldexp(nearest, exponent))
    bits = 0x7F800000 if rounded >= 2.0**128 else unpack("<I", pack("<f", rounded))[0]
    return sign | bits, distance


def exact(function: str, argument: int) -> tuple[int, mpmath.mpf]:
    with mpmath.workprec(PRECISION_BITS):
        return round_to_fp32(FUNCTIONS[function](mpmath.mpf(value_of_bits(argument))))


def build(folder: Path) -> Path:
    program = folder / "scan_functions"
    sources = [str(CPU / source) for source in SOURCES]
    scanner = str(Path(__file__).parent / "scan_functions.cpp")
    subprocess.run(["g++", *FLAGS, "-Wno-unused-function", scanner, *sources, "-o", str(program)], check=True)
    return program


def scan(program: Path, function: str, mode: str, first: int, last: int) -> Iterator[list[str]]:
    command = [str(program), function, mode, f"{first:x}", f"{last:x}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield line.split()
    if process.returncode != 0:
        raise RuntimeError(f"{command} ended with {process.returncode}")


def find_hard(program: Path, function: str) -> list[tuple[int, int]]:
    last = 0x7FFFFFFF if function in SYMMETRIC else 0xFFFFFFFF
    hard = []
    for _, argument in scan(program, function, "quick", 0, last):
        bits, distance = exact(function, int(argument, 16))
        if distance < HARD_DISTANCE:
            hard.append((int(argument, 16), bits))
    return hard


def table_text(function: str, hard: list[tuple[int, int]]) -> str:
    entries = [f"{{0x{argument:08x}u, 0x{value:08x}u}}," for argument, value in hard]
    lines = "\n".join("    " + " ".join(entries[i : i + 4]) for i in range(0, len(entries), 4))
    name = function.upper()
    table = f"const HardTable HARD_{name} = {{{name}_ENTRIES, {len(hard)}}};"
    return f"static const HardArgument {name}_ENTRIES[] = {{\n{lines}\n}};\n{table}\n"


def write(program: Path) -> None:
    parts = ["// Made by csrc/tools/hard_arguments.py.", '#include "hard_arguments.hpp"', "", "namespace leafsum {", ""]
    for function in FUNCTIONS:
        hard = find_hard(program, function)
        report(f"{function}: {len(hard)} hard arguments")
        parts += ["// clang-format off", table_text(function, hard) + "// clang-format on", ""]
    (CPU / "hard_arguments.cpp").write_text("\n".join([*parts, "}  // namespace leafsum", ""]))


def check(program: Path, function: str) -> bool:
    num_checked = num_near = 0
    problems: list[str] = []
    for kind, *rest in scan(program, function, "full", 0, 0xFFFFFFFF):
        if kind == "checked":
            num_checked = int(rest[0])
        elif kind == "near":
            num_near += 1
            expected, _ = exact(function, int(rest[0], 16))
            if int(rest[1], 16) != expected:
                problems.append(f"wrong {rest[0]} {rest[1]} {expected:08x}")
        else:
            problems.append(" ".join([kind, *rest]))
    report(f"{function}: {num_checked} arguments, {num_near} of them settled by mpmath, {len(problems)} wrong")
    report("".join(f"  {problem}\n" for problem in problems[:20]), end="")
    return not problems and num_checked == 2**32


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        if arguments[:1] == ["write"]:
            write(program)
            return 0
        if arguments[:1] == ["check"]:
            results = [check(program, function) for function in arguments[1:] or FUNCTIONS]
            return 0 if all(results) else 1
    sys.stderr.write(str(__doc__))
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
