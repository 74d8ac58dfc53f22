"""`python -m leafsum`: the command line, the same as `leafsum`."""

from .runtime.cli import main

if __name__ == "__main__":
    main()
