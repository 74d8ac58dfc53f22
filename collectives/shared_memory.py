"""Shared memory: the transport between CPU ranks of one host. A call costs one wake, and whoever waits sleeps.

    memory   meeting words | records of parity 0, 1 | areas of parity 0 | areas of parity 1

A record says what call a rank makes, an area holds its part. A rank fills both, waits until all have come, and copies
all parts out. Calls take turns with the two parities, so nobody has to wait again until all have read: a rank that
writes for call n has ended call n - 1, so all ranks had come to call n - 1, so all had read call n - 2, whose parity
it is.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import time
import weakref
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from .. import _C
from ..errors import TransportError
from .meeting import CLOSED, FAILED, Meeting, Peers, num_words
from .process_transport import ProcessTransport

AREA_BYTES = 1 << 20
"""Of one rank and parity; the kernel gives it pages when they are first used. Larger parts travel in pieces."""

NUM_PARITIES = 2
_ALL_GATHER, _BROADCAST, _BARRIER = range(3)
_RECORD = struct.Struct("=3q")  # of a call: which of the three, bytes, root


class SharedMemoryTransport(ProcessTransport):
    """One rank's end of memory that the ranks of one host share.

    Needs Linux, and ranks of one user that see one another in /proc (one PID namespace); threads of one process will
    do. `store_path` must name a file that does not exist yet in an existing folder, the same for all ranks, used once;
    the constructor returns when all ranks have come, and the file is gone. `meeting_timeout_s` (None: timeout_s) is the
    deadline of that meeting, `timeout_s` of every later call. The memory has no name in any file system: it goes with
    the last process that maps it, however that ends. Between calls a rank costs nothing, in waits one look a second at
    its peers.
    """

    kind: ClassVar[str] = "shared-memory"

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        store_path: str | Path,
        timeout_s: float,
        meeting_timeout_s: float | None = None,
    ) -> None:
        super().__init__(rank, num_ranks, store_path, timeout_s, meeting_timeout_s)
        self._memory: _Memory | None = None
        limit_s = self._meeting_timeout_s
        self._memory = memory = self._named(
            "meeting of all ranks", limit_s, _meet, rank, num_ranks, Path(store_path), limit_s
        )
        self._leave = weakref.finalize(self, memory.meeting.leave, CLOSED)  # also where nobody calls close()

    def close(self) -> None:
        super().close()
        self._leave()
        self._memory = None  # the mapping and the pidfds go with it, or with a call that is under way

    def _all_gather(self, gathered: torch.Tensor, part: torch.Tensor) -> None:
        memory, deadline_s, num_bytes = self._open_memory(), self._deadline_s(), part.nbytes
        call = _RECORD.pack(_ALL_GATHER, num_bytes, 0)
        source, target = _address(part), _address(gathered)
        for begin in range(0, num_bytes, AREA_BYTES):
            size = min(AREA_BYTES, num_bytes - begin)
            areas = memory.exchange(call, source + begin, size, deadline_s)
            _C.copy_pieces(areas, AREA_BYTES, target + begin, num_bytes, size, self.num_ranks)

    def _broadcast(self, payload: torch.Tensor, root: int) -> None:
        memory, deadline_s, num_bytes = self._open_memory(), self._deadline_s(), payload.nbytes
        call = _RECORD.pack(_BROADCAST, num_bytes, root)
        address = _address(payload)
        for begin in range(0, num_bytes, AREA_BYTES):
            size = min(AREA_BYTES, num_bytes - begin)
            areas = memory.exchange(call, address + begin, size if self.rank == root else 0, deadline_s)
            _C.copy_pieces(areas + root * AREA_BYTES, 0, address + begin, 0, size, 1)

    def _barrier(self) -> None:
        self._open_memory().exchange(_RECORD.pack(_BARRIER, 0, 0), 0, 0, self._deadline_s())

    def _give_up(self, operation: str) -> None:
        super()._give_up(operation)
        if memory := self._memory:
            memory.meeting.leave(FAILED)

    def _open_memory(self) -> _Memory:
        if self._memory is None:
            raise ConnectionError("the transport was closed meanwhile")
        return self._memory

    def _deadline_s(self) -> float:
        return time.monotonic() + self._timeout_s


class _Memory:
    """The shared memory, as one rank has mapped it.

    Bytes are moved between addresses: to make a view of a tensor takes longer than to copy ten kilobytes.
    """

    def __init__(self, fd: int, rank: int, num_ranks: int, peers: Peers) -> None:
        self._mapped = mmap.mmap(fd, _memory_bytes(num_ranks))  # the addresses hold while this object does
        self.rank = rank
        self.num_ranks = num_ranks
        self.meeting = Meeting(np.frombuffer(self._mapped, np.int32, num_words(num_ranks)), rank, peers)
        records = memoryview(self._mapped)[4 * num_words(num_ranks) :]
        areas = ctypes.addressof(ctypes.c_char.from_buffer(self._mapped)) + _head_bytes(num_ranks)
        firsts = [parity * num_ranks for parity in range(NUM_PARITIES)]
        self._records = [records[first * _RECORD.size :][: num_ranks * _RECORD.size] for first in firsts]
        self._own_records = [each[rank * _RECORD.size :][: _RECORD.size] for each in self._records]
        self._areas = [areas + first * AREA_BYTES for first in firsts]

    def exchange(self, call: bytes, source: int, size: int, deadline_s: float) -> int:
        """`size` bytes (up to AREA_BYTES) at the address `source` -> the address of the areas of all ranks.

        They hold until this rank's next exchange. Raises as `Meeting.wait_for_all`, and TransportError where another
        rank makes another call.
        """
        self.meeting.refuse_a_fork()
        parity = self.meeting.generation % NUM_PARITIES
        areas, records = self._areas[parity], self._records[parity]
        if size:
            _C.copy_pieces(source, 0, areas + self.rank * AREA_BYTES, 0, size, 1)
        self._own_records[parity][:] = call
        self.meeting.wait_for_all(deadline_s)
        if records.tobytes() != call * self.num_ranks:
            self._name_another_call(call, [_describe(*other) for other in _RECORD.iter_unpack(records)])
        return areas

    def _name_another_call(self, call: bytes, found: list[str]) -> None:
        own = _describe(*_RECORD.unpack(call))
        rank = next(rank for rank, other in enumerate(found) if other != own)
        raise TransportError(
            f"expected one call on all ranks, found {own} on rank {self.rank}, {found[rank]} on rank {rank}: the ranks "
            "do not run the same program"
        )


def _describe(call: int, num_bytes: int, root: int) -> str:
    return {
        _ALL_GATHER: f"all_gather of {num_bytes} bytes a rank",
        _BROADCAST: f"broadcast of {num_bytes} bytes from rank {root}",
        _BARRIER: "barrier",
    }[call]


def _address(tensor: torch.Tensor) -> int:
    if not tensor.is_cpu:
        raise ValueError(f"expected a tensor in the host's memory, found one on {tensor.device}")
    return tensor.data_ptr()


def _meet(rank: int, num_ranks: int, store_path: Path, timeout_s: float) -> _Memory:
    deadline_s = time.monotonic() + timeout_s
    try:
        return _share(rank, num_ranks, store_path, deadline_s)
    except (TimeoutError, ConnectionError):
        raise
    except OSError as error:
        raise ConnectionError(
            f"the memory cannot be shared: {error}; look at free space and at {store_path}, and whether all ranks are "
            "of one user and see one another in /proc; if not, use Gloo"
        ) from error


def _share(rank: int, num_ranks: int, store_path: Path, deadline_s: float) -> _Memory:
    """All ranks meet in the file first, where rank 0 says in which of its descriptors the memory is.

    Then once more, when all have mapped it. The calls have a meeting of their own, in memory that no disk writes back.
    """
    peers = Peers()
    words, name = _open_store(store_path, num_ranks)
    door = Meeting(words, rank, peers)
    fd = -1
    try:
        if rank == 0:
            fd = _make_memory(name, num_ranks)
            door.notes[0] = fd
        door.wait_for_all(deadline_s)
        peers.watch(door.pids)
        if rank == 0:
            store_path.unlink()
        else:
            fd = _open_memory_of(door.pids[0], int(door.notes[0]), name)
        memory = _Memory(fd, rank, num_ranks, peers)
        door.wait_for_all(deadline_s)
        return memory
    except BaseException:
        door.leave(FAILED)
        raise
    finally:
        if fd >= 0:
            os.close(fd)


def _open_store(path: Path, num_ranks: int) -> tuple[NDArray[np.int32], str]:
    """The words of the file's meeting, and a name for the memory that no other meeting of this host has."""
    num_bytes = 4 * num_words(num_ranks)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        found = os.fstat(fd)
        if found.st_size not in (0, num_bytes):
            raise ConnectionError(
                f"{path} has {found.st_size} bytes, not {num_bytes}: it is another file, or ranks disagree about "
                "their number"
            )
        os.posix_fallocate(fd, 0, num_bytes)  # a hole on a full disk would be a SIGBUS, this is an OSError
        return np.frombuffer(mmap.mmap(fd, num_bytes), np.int32), f"leafsum-{found.st_dev:x}-{found.st_ino:x}"
    finally:
        os.close(fd)


def _make_memory(name: str, num_ranks: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, _memory_bytes(num_ranks))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def _open_memory_of(pid: int, fd: int, name: str) -> int:
    """A descriptor of another process's memory. The name tells it from what a later process of that pid may hold."""
    link = f"/proc/{pid}/fd/{fd}"
    try:
        if os.readlink(link) == f"/memfd:{name} (deleted)":
            return os.open(link, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        pass
    raise ConnectionError(
        f"rank 0 (pid {pid}) does not hold the memory: it has ended or given up, look for its error first; or it runs "
        "in another PID namespace, then use Gloo"
    )


def _head_bytes(num_ranks: int) -> int:
    """Of the words and the records, in whole pages."""
    num_bytes = 4 * num_words(num_ranks) + NUM_PARITIES * num_ranks * _RECORD.size
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _memory_bytes(num_ranks: int) -> int:
    return _head_bytes(num_ranks) + NUM_PARITIES * num_ranks * AREA_BYTES
