"""The command line's frame: what a command's end means for the exit code, and how an error is told.

Exit codes: 0 done; 1 a difference or a failed run; 2 wrong use (settings, flags, model folder, prompt); 130 Ctrl-C,
also where what had begun was finished after it.
The commands are imported inside the frame, so that a Ctrl-C during the import ends as any other.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Sequence

from ...errors import ConfigError, GangError, LeafsumError, ModelError, OutputError, RankError
from .exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_WRONG_USE
from .stdio import discard_output, flush_output, hold_standard_streams, say, tell


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `leafsum` and `python -m leafsum`: run, then exit with the code above."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """The exit code of one command line. Never raises but for a defect of the error paths themselves."""
    try:
        hold_standard_streams()
        exit_code = _run_command(arguments)
        flush_output()
        return exit_code
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else EXIT_FAILED
    except BrokenPipeError:
        discard_output()  # the reader has gone, as in `| head`: nobody is left to tell
        return EXIT_FAILED
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        say("interrupted")
        return EXIT_INTERRUPTED
    except Exception as error:
        return _tell(error, debug=False)


def _run_command(arguments: Sequence[str]) -> int:
    """Run one command; its errors are told here, where --debug is known."""
    import click

    from .group import command_line
    from .options import CommandState

    state = CommandState()
    try:
        exit_code = command_line.main(args=list(arguments), prog_name="leafsum", standalone_mode=False, obj=state)
        return exit_code if isinstance(exit_code, int) else 0
    except click.Abort:
        raise KeyboardInterrupt from None
    except click.ClickException as error:
        error.show()
        return EXIT_WRONG_USE
    except BrokenPipeError:
        raise
    except Exception as error:
        return _tell(error, state.debug)


def _tell(error: Exception, debug: bool) -> int:
    """One paragraph on standard error, with --debug the traceback before it; the exit code."""
    if debug:
        tell("".join(traceback.format_exception(error)))
        if isinstance(error, RankError) and error.traceback_text:
            say(f"on rank {error.rank}:\n{error.traceback_text}")
        if isinstance(error, GangError) and error.events:
            say("\n".join(["the last events about that rank, in seconds before now:", *error.events]))
    if isinstance(error, OutputError):
        discard_output()
    if isinstance(error, LeafsumError):
        say(str(error))
    else:
        hint = "" if debug else " Run it again with --debug for the traceback."
        say(f"unexpected {type(error).__name__}: {error}. This is a defect of leafsum or of its installation.{hint}")
    return EXIT_WRONG_USE if isinstance(error, ConfigError | ModelError) else EXIT_FAILED
