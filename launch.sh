#!/usr/bin/env bash
#
# NAME
#     launch.sh - make leafsum's environment once, then run leafsum in it
#
# USAGE
#     ./launch.sh                      the demonstration: one prompt at TP=1 and at TP=2, its text, equal hashes
#     ./launch.sh COMMAND [ARG...]     leafsum COMMAND: demo, generate, receipt, verify, inspect, doctor, bench; --help
#     ./launch.sh test [ARG...]        everything that must be green: ruff, mypy, clang-format, pytest
#                                      --full adds the tests that take minutes; other ARGs go to pytest
#                                      (-k NAME, runtime/test_settings.py: paths are relative to tests/)
#                                      one test process a core, 8 at most; -n 0 is none beside pytest's own
#     ./launch.sh setup                only make the environment
#     ./launch.sh manual               this text
#
# WHAT IT DOES
#     The first run makes .venv beside this file: the packages of requirements.lock (with PyTorch, a few minutes), then
#     leafsum itself, whose C++ extension is compiled here. Later runs find both as they should be and start at once.
#     A changed lock installs again, a changed csrc/ compiles again; a moved checkout, another Python or an interrupted
#     first run starts afresh. Several at once are safe: the first works, the others wait. Progress goes to stderr.
#     It works from any folder, through a symbolic link, and in a checkout of any name, spaces included.
#
# NEEDS
#     Linux on x86-64 or aarch64 with util-linux; Python 3.11 or newer with venv and headers; a C++17 compiler; once, a
#     network or a local folder of packages that pip knows of. What is missing is named, with the package to install.
#
# VARIABLES
#     PYTHON          the interpreter that makes the environment (the first python3 on PATH that is new enough)
#     CXX             the C++ compiler (the one Python was built with, commonly g++)
#     PIP_*           pip's own: PIP_FIND_LINKS=DIR, PIP_INDEX_URL=..., PIP_NO_INDEX=1
#     LEAFSUM_*       leafsum's settings: ./launch.sh generate --help
#
# EXIT STATUS
#     leafsum's or the first failing check's own; 69 when something that it needs is missing
#
# EXAMPLES
#     ./launch.sh generate --model tiny --tp 3 --prompt "Once upon a time" --max-tokens 16 --json
#     ./launch.sh test -k launch
#     PYTHON=python3.12 CXX=clang++ ./launch.sh setup

set -euo pipefail

root=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
venv=$root/.venv
python=$venv/bin/python
EXIT_MISSING=69 # EX_UNAVAILABLE of sysexits.h

main() {
    local command=${1:-demo}
    [[ $command == manual ]] && { manual; return; }
    set_up
    case $command in
        setup) ;;
        test) shift; run_checks "$@" ;;
        demo) exec "$venv/bin/leafsum" demo "${@:2}" ;;
        *) exec "$venv/bin/leafsum" "$@" ;;
    esac
}

manual() {
    sed -n '3,/^$/s/^# \{0,1\}//p' "$root/launch.sh"
}

# ---- the environment: two steps, each with a stamp in .venv that says what it was made from --------------------------

set_up() {
    is_current environment && is_current extension && return
    command -v flock >/dev/null || missing "flock is missing here: install util-linux"
    (
        flock --nonblock 9 || { say "another launch.sh is at work in $root; waiting for it"; flock 9; }
        is_current environment || make_environment
        is_current extension || make_extension
    ) 9>>"$root/.venv.lock"
}

is_current() { # STEP: whether its stamp equals what it would be made from now
    [[ -x $python && $(cat "$venv/stamp-$1" 2>/dev/null) == "$("$1"_sources)" ]]
}

environment_sources() {
    printf '%s\n' "$root" "$("$python" -I -S -c 'import sys; print(sys.version)')"
    sha256sum <"$root/requirements.lock"
}

extension_sources() {
    environment_sources
    cd "$root"
    find . -maxdepth 1 -name '_C*.so' # it is gone, or not built yet
    find setup.py pyproject.toml csrc -type f -print0 | LC_ALL=C sort --zero-terminated | xargs -0 sha256sum
}

make_environment() {
    local base_python made_for
    made_for=$(head -n 2 "$venv/stamp-environment" 2>/dev/null || true)
    if [[ ! -x $python || $made_for != "$(environment_sources | head -n 2)" ]]; then
        base_python=$(find_python)
        check_build_tools "$base_python"
        say "making $venv with $base_python"
        "$base_python" -m venv --clear "$venv"
    fi
    rm -f "$venv"/stamp-*
    say "installing the packages of requirements.lock (once; PyTorch makes this long)"
    pip_install --requirement "$root/requirements.lock"
    environment_sources >"$venv/stamp-environment"
}

make_extension() {
    check_build_tools "$python"
    rm -f "$venv/stamp-extension"
    say "building leafsum._C from csrc/ (a minute or two)"
    pip_install --no-build-isolation --no-deps --editable "$root"
    (extension_sources) >"$venv/stamp-extension"
}

pip_install() {
    local quiet=(--quiet --quiet) # errors still show
    [[ -t 2 ]] && quiet=()
    "$python" -m pip install --disable-pip-version-check "${quiet[@]}" "$@" >&2
}

# ---- what the machine must have ----------------------------------------------------------------------------------

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.{14,13,12,11} python; do
        if "$candidate" -I -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            "$candidate" -I -c 'import sys; print(sys.executable)'
            return
        fi
        [[ $candidate == "${PYTHON:-}" ]] && missing "PYTHON=$PYTHON is no Python of version 3.11 or newer"
    done
    missing "no Python 3.11 or newer on PATH: install python3 (python3.11 or newer), python3-venv and python3-dev," \
        "or name one with PYTHON=/path/to/python3"
}

check_build_tools() { # PYTHON
    local report
    report=$("$1" -I - <<'PYTHON_CODE'
import importlib.util, os, shlex, shutil, sys, sysconfig

name = f"python{sys.version_info.major}.{sys.version_info.minor}"
compiler = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++")[0]
header = os.path.join(sysconfig.get_path("include"), "Python.h")
if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
    print(f"the venv module of {sys.executable}: install {name}-venv (or python3-venv)")
if not os.path.isfile(header):
    print(f"the headers of {sys.executable} ({header}): install {name}-dev (or python3-dev; python3-devel on Fedora)")
if not shutil.which(compiler):
    print(f"the C++ compiler {compiler}: install g++ (gcc-c++ on Fedora), or name one with CXX=")
PYTHON_CODE
    )
    [[ -z $report ]] || missing "missing here, by their names in Debian and Ubuntu:"$'\n'"$report"
}

say() {
    printf 'leafsum: %s\n' "$*" >&2
}

missing() {
    say "$@"
    exit "$EXIT_MISSING"
}

# ---- ./launch.sh test ----------------------------------------------------------------------------------------------

run_checks() {
    local bin=$venv/bin link=$venv/checkout/leafsum
    # mypy needs the package under its own name, whatever the checkout is called
    mkdir -p "$venv/checkout" && ln -sfn "$root" "$link"
    cd "$root"
    "$bin/ruff" check .
    "$bin/ruff" format --check .
    find csrc -type f -print0 | xargs -0 "$bin/clang-format" --dry-run --Werror
    export MYPYPATH=$venv/checkout
    "$bin/mypy" --package leafsum
    cd "$root/tests"
    "$bin/mypy" --config-file mypy.ini --cache-dir "$root/.mypy_cache/tests" .
    # worksteal leaves neighbours in one process, for the fixtures that they share, and still evens out at the end
    local at_once=(-n auto --maxprocesses 8 --dist worksteal)
    exec "$python" -m pytest -c pytest.ini --rootdir . "${at_once[@]}" "${@#tests/}"
}

main "$@"
