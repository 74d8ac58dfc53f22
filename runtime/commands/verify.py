"""`leafsum verify`: a receipt's prompts once more, here, and where the first bit differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .options import debug_option, list_option, settings_options
from .stdio import require_output

LOCAL_SETTINGS = ("kv_tokens", "log_level", "start_timeout_s", "step_timeout_s")
"""What another machine may need otherwise; all else is as the receipt has it."""

EPILOG = """\b
Examples:
  leafsum verify receipt.json
  leafsum verify receipt.json --tp 3,5 --exchange slots,nodes       also tp counts that the receipt has not
  leafsum verify receipt.json --model DIR                           where it was made from a local folder

\b
First it says whether weights, numerics version, settings and arithmetic are the receipt's; where they are not, the bits
cannot be expected to be equal, and nothing runs. Then every crossing of the lists above serves the receipt's prompts,
with NaN in all memory that must not be read, random delays and shuffled prompts, and the hashes of tokens, logits and
of every row after every layer are compared with the receipt's. What the receipt itself has not shown, such as the power
of its prompts, is said beside it. Every rank allocates all experts, NaN where it owns none: tp ranks need tp times the
memory of the experts. Exit codes: 0 equal, 1 a difference, an edited receipt or a failed run, 2 wrong use.
"""


@click.command(epilog=EPILOG)
@click.argument("path", metavar="RECEIPT.json", type=click.Path(path_type=Path))
@click.option("--model", default=None, metavar="DIR|tiny|HUB-ID", help="The receipt's model. [default: by its name]")
@click.option(
    "--tp",
    default=None,
    metavar="A,B,...",
    help="Rank counts. [default: the receipt's largest that has a core for every rank here, else 2]",
)
@list_option("exchange", "auto", "Exchanges.")
@list_option("placement", "contiguous", "Placements of experts.")
@list_option("transport", "shared", "Transports.")
@list_option("prefill_chunk", "64", "Most prompt tokens in one step.")
@click.option(
    "--concurrency",
    default=None,
    metavar="A,B,...",
    help="Most requests at once, at most one a prompt. [default: 4, or a request a prompt]",
)
@list_option("threads", "1", "Compute threads of a rank.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@settings_options(LOCAL_SETTINGS)
@debug_option
def verify(path: Path, model: str | None, tp: str | None, as_json: bool, **flags: Any) -> None:
    """Run a receipt again here, and compare."""
    require_output()
    from .rerun import rerun

    rerun(path, model, tp, as_json, flags)
