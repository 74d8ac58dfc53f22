"""The coordinator's side: pool, coordinator, scheduler, settings, receipts and the command line. Imports no torch."""

# Makes `import runtime` from a checkout fail at once: the folder is leafsum.runtime, or nothing.
from .. import errors as errors
