"""The command line: one module a command, and what they share. Nothing slow is imported before a command runs."""
