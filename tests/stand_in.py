"""A child process for supervision tests: `python -m stand_in MANNER --death-fd N`, with tests/ on PYTHONPATH."""

import collections
import itertools
import os
import signal
import sys
import threading
import time

LEAVES_WITH = {"polite": 0, "confessed": 70}
"""Exit codes once the death pipe closes; 70 is a rank's that has told its failure."""


def main() -> None:
    manner, death_fd = sys.argv[1], int(sys.argv[-1])
    if manner == "fails":
        sys.exit(3)
    if manner == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stderr.write("up\n")
    sys.stderr.flush()
    if manner in LEAVES_WITH:
        os.read(death_fd, 1)
        sys.exit(LEAVES_WITH[manner])
    if manner == "busy":
        threading.Thread(target=collections.deque, args=(itertools.repeat(0), 0)).start()
    time.sleep(600)


if __name__ == "__main__":
    main()
