"""`leafsum doctor`: the checks of this machine, and the runs that live on it, one line each."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import debug_option
from .stdio import require_output, write_line

if TYPE_CHECKING:
    from ..live_runs import LiveRun
    from .checks import Check

EPILOG = """\b
Examples:
  leafsum doctor
  leafsum doctor --json

\b
Every line says ok, warn or fail, what was found, and what to do. Exit codes: 0 nothing failed, 1 something did.
A line for every run of yours that lives: its id, age, program, and of each process its state as in ps (T is stopped),
CPU time and resident memory. Run folders that no run holds are what a killed run left; the next start removes them.
"""

RUN_ADVICE = (
    "a rank that is stopped or missing is replaced at its next step's deadline (--step-timeout-s), and kill -CONT PID "
    "wakes a stopped one; a coordinator that is stopped, or what a dead program left, end with kill -9"
)


@click.command(epilog=EPILOG)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@debug_option
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Check this machine, and show what runs on it."""
    require_output()
    from ..live_runs import live_runs
    from ..run_folder import abandoned_in
    from .checks import Check, examine

    checks = examine()
    runs, abandoned = live_runs(), [str(path) for path in abandoned_in(Path(tempfile.gettempdir()))]
    failed = [check for check in checks if check.status == "fail"]
    if as_json:
        found = {"checks": [check.to_dict() for check in checks], "runs": [run.to_dict() for run in runs]}
        write_line(json.dumps({"ok": not failed, **found, "abandoned_run_folders": abandoned}))
    else:
        lines = [*checks, *map(_line_of, runs)]
        lines += [Check("abandoned", "ok", path, "the next start removes it") for path in abandoned]
        width = max(len(line.name) for line in lines)
        for line in lines:
            advice = f" -> {line.advice}" if line.advice else ""
            write_line(f"{line.status:4}  {line.name:{width}}  {line.found}{advice}")
    if failed:
        context.exit(1)


def _line_of(run: LiveRun) -> Check:
    from .checks import Check

    return Check("run", "warn", run.line(), RUN_ADVICE) if run.is_striking else Check("run", "ok", run.line())
