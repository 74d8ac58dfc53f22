"""A rank process with other timeouts: `SETUP_TIMEOUT_S=0.2 python -m timed_worker`, with tests/ on PYTHONPATH."""

import os

from leafsum.ranks import worker

if __name__ == "__main__":
    for name in {"SETUP_TIMEOUT_S", "END_TIMEOUT_S"} & os.environ.keys():
        setattr(worker, name, float(os.environ[name]))
    worker.main()
