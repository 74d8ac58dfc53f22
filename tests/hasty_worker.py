"""A rank process that waits for its Setup for a moment only: `python -m hasty_worker`, with tests/ on PYTHONPATH."""

from leafsum.ranks import worker

if __name__ == "__main__":
    worker.SETUP_TIMEOUT_S = 0.2
    worker.main()
