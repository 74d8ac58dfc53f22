"""What the end of a command says to a shell."""

EXIT_FAILED = 1
"""A difference, or a run that failed."""

EXIT_WRONG_USE = 2
"""Settings, flags, model folder or prompt."""

EXIT_INTERRUPTED = 130
"""Ctrl-C, as a shell has it: 128 and the number of SIGINT."""
