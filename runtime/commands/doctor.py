"""`leafsum doctor`: the checks of this machine, one line each."""

from __future__ import annotations

import json

import click

from .options import debug_option
from .stdio import require_output, write_line

EPILOG = """\b
Examples:
  leafsum doctor
  leafsum doctor --json

\b
Every line says ok, warn or fail, what was found, and what to do. Exit codes: 0 nothing failed, 1 something did.
"""


@click.command(epilog=EPILOG)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@debug_option
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Check this machine."""
    require_output()
    from .checks import examine

    checks = examine()
    failed = [check for check in checks if check.status == "fail"]
    if as_json:
        write_line(json.dumps({"ok": not failed, "checks": [check.to_dict() for check in checks]}))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            advice = f" -> {check.advice}" if check.advice else ""
            write_line(f"{check.status:4}  {check.name:{width}}  {check.found}{advice}")
    if failed:
        context.exit(1)
