"""The rank side: one process per rank that owns slots, weights and kernels, and executes the coordinator's plans.

`spec`, `sizes`, `checkpoint`, `tiny`, `messages` and what they import are free of torch: the coordinator and the
command line use them too.
"""

from ..errors import LeafsumError as LeafsumError
