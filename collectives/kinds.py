"""The transports between processes, by the names that a setting has for them."""

from .gloo import GlooTransport
from .shared_memory import SharedMemoryTransport

TRANSPORTS: dict[str, type[SharedMemoryTransport] | type[GlooTransport]] = {
    "shared": SharedMemoryTransport,
    "gloo": GlooTransport,
}
