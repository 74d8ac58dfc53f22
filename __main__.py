"""`python -m leafsum`: the command line, the same as `leafsum`."""

from .runtime.commands.main import main

if __name__ == "__main__":
    main()
