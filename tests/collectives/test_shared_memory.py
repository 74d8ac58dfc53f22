"""Shared memory between threads of this process: what arrives, in which order memory is reused, what is refused."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from leafsum.collectives import shared_memory
from leafsum.collectives.delays import DelayedTransport
from leafsum.collectives.meeting import Meeting
from leafsum.collectives.shared_memory import SharedMemoryTransport
from leafsum.collectives.testing import run_ranks
from leafsum.collectives.transport import Transport
from leafsum.errors import DeadlineExceeded, TransportError

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool)


def run_shared(num_ranks: int, function: Callable[[Any], Any], timeout_s: float = 60.0) -> list[Any]:
    """function(transport) on every rank, each in a thread; the results or errors in rank order."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(num_ranks) as threads:

        def run(rank: int) -> Any:
            transport = SharedMemoryTransport(rank, num_ranks, f"{folder}/rendezvous", timeout_s, 60.0)
            try:
                return function(transport)
            except Exception as error:
                return error
            finally:
                transport.close()

        found = list(threads.map(run, range(num_ranks)))
        assert os.listdir(folder) == []
        return found


@pytest.fixture
def small_areas(monkeypatch) -> None:
    """Areas of 64 bytes, so that small parts travel in pieces."""
    monkeypatch.setattr(shared_memory, "AREA_BYTES", 64)


calls = st.tuples(
    st.sampled_from(["all_gather", "all_gather_unequal", "broadcast", "barrier"]),
    st.lists(st.integers(0, 7), max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)


def make_calls(transport: Transport, drawn: list[tuple[str, list[int], torch.dtype, int]]) -> tuple[list, dict]:
    """Everything that a rank receives, as bytes, and its stats."""
    received: list[object] = []
    for kind, shape, dtype, seed in drawn:
        generator = torch.Generator().manual_seed(100 * seed + transport.rank)

        def part(*axes: int, dtype: torch.dtype = dtype, generator: torch.Generator = generator) -> torch.Tensor:
            values = torch.randint(0, 256, (*axes, 8), dtype=torch.uint8, generator=generator)
            return values.bool() if dtype == torch.bool else values.view(dtype)

        if kind == "all_gather":
            gathered = [transport.all_gather(part(*shape))]
        elif kind == "all_gather_unequal":
            counts = [(seed + rank) % 4 for rank in range(transport.num_ranks)]
            gathered = [*transport.all_gather_unequal(part(counts[transport.rank], *shape), counts)]
        elif kind == "broadcast":
            gathered = [transport.broadcast(part(*shape), root=seed % transport.num_ranks)]
        else:
            transport.barrier()
            gathered = []
        received += [(list(each.shape), each.dtype, each.contiguous().view(torch.uint8).tolist()) for each in gathered]
    return received, transport.stats.as_dict()


@pytest.mark.usefixtures("small_areas")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 8), st.lists(calls, min_size=1, max_size=6))
def test_it_moves_and_counts_what_the_transport_between_threads_does(num_ranks, drawn):
    found = run_shared(num_ranks, lambda transport: make_calls(transport, drawn))
    assert found == run_ranks(num_ranks, lambda transport: make_calls(transport, drawn))


def test_parts_larger_than_an_area_travel_in_pieces():
    num_bytes = 2 * shared_memory.AREA_BYTES + 5

    def gather(transport: Transport) -> bool:
        parts = [torch.randint(0, 256, (num_bytes,), generator=torch.Generator().manual_seed(r)).byte() for r in (0, 1)]
        gathered = transport.all_gather(parts[transport.rank])
        received = transport.broadcast(parts[transport.rank], root=1)
        return torch.equal(gathered, torch.stack(parts)) and torch.equal(received, parts[1])

    assert run_shared(2, gather) == [True, True]


NUM_CALLS = 9


def gather_while_a_reader_is_slow(monkeypatch) -> list[Any]:
    """Rank 1 does not read what it has gathered before rank 0 has written its part of the call after."""
    written = {0: -1, 1: -1}  # by rank, the last call
    changed = threading.Condition()
    wait_for_all, exchange = Meeting.wait_for_all, shared_memory._Memory.exchange

    def tell_and_wait(meeting: Meeting, deadline_s: float) -> None:
        with changed:
            written[meeting.rank] = meeting.generation
            changed.notify_all()
        wait_for_all(meeting, deadline_s)

    def exchange_and_read_late(memory: Any, *arguments: Any) -> list[int]:
        areas = exchange(memory, *arguments)
        next_call = memory.meeting.generation
        with changed:
            if memory.rank == 1 and next_call < NUM_CALLS:
                assert changed.wait_for(lambda: written[0] == next_call, 30.0)
        return areas

    def gather(transport: Transport) -> list[list[int]]:
        return [transport.all_gather(torch.tensor([call, transport.rank])).tolist() for call in range(NUM_CALLS)]

    with monkeypatch.context() as patch:
        patch.setattr(Meeting, "wait_for_all", tell_and_wait)
        patch.setattr(shared_memory._Memory, "exchange", exchange_and_read_late)
        return run_shared(2, gather)


def test_a_slow_reader_finds_what_was_written_for_it(monkeypatch):
    expected = [[[call, 0], [call, 1]] for call in range(NUM_CALLS)]
    assert gather_while_a_reader_is_slow(monkeypatch) == [expected, expected]


def test_with_one_parity_a_slow_reader_would_find_the_next_call(monkeypatch):
    monkeypatch.setattr(shared_memory, "NUM_PARITIES", 1)
    _, slow = gather_while_a_reader_is_slow(monkeypatch)
    assert slow[0] == [[1, 0], [0, 1]]


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_random_delays_change_nothing(num_ranks):
    def gather(transport: Transport) -> list[list[int]]:
        delayed = DelayedTransport(transport, seed=3)
        return [delayed.all_gather(torch.tensor(100 * call + transport.rank)).tolist() for call in range(300)]

    expected = [[100 * call + rank for rank in range(num_ranks)] for call in range(300)]
    assert run_shared(num_ranks, gather) == [expected] * num_ranks


@pytest.mark.parametrize(
    ("other_call", "text"),
    [
        (lambda transport: transport.all_gather(torch.zeros(3)), "all_gather of 12 bytes a rank"),
        (lambda transport: transport.broadcast(torch.zeros(2), 1), "broadcast of 8 bytes from rank 1"),
        (lambda transport: transport.barrier(), "barrier"),
    ],
)
def test_different_calls_are_an_error_on_every_rank_that_names_both(other_call, text):
    def disagree(transport: Transport) -> None:
        if transport.rank == 1:
            other_call(transport)
        else:
            transport.all_gather(torch.zeros(2))

    own = "all_gather of 8 bytes a rank"
    errors = run_shared(3, disagree)
    assert all(isinstance(error, TransportError) for error in errors)
    assert f"expected one call on all ranks, found {own} on rank 0, {text} on rank 1" in str(errors[0])
    assert f"expected one call on all ranks, found {text} on rank 1, {own} on rank 0" in str(errors[1])
    assert f"expected one call on all ranks, found {own} on rank 2, {text} on rank 1" in str(errors[2])


@pytest.fixture
def pair(tmp_path) -> list[SharedMemoryTransport]:
    """Both ranks of a gang."""
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda rank: SharedMemoryTransport(rank, 2, tmp_path / "rendezvous", 60.0), range(2)))


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "dropped"])
def test_who_waits_for_a_rank_that_has_left_is_told_at_once(pair, is_closed):
    leave = pair[1].close if is_closed else pair.pop
    timer = threading.Timer(0.2, leave)
    start_s = time.monotonic()
    timer.start()
    with pytest.raises(TransportError, match=r"but rank 1 \(pid \d+\) has closed its transport"):
        pair[0].barrier()
    with pytest.raises(TransportError, match="was refused: an earlier barrier failed"):
        pair[0].barrier()
    timer.join()
    assert time.monotonic() - start_s < 30


def test_a_rank_that_gave_up_is_told_to_those_that_come_later():
    def give_up(transport: SharedMemoryTransport) -> str:
        transport._timeout_s = 0.05 if transport.rank == 0 else 60.0
        if transport.rank == 1:
            time.sleep(0.5)
            transport.barrier()  # rank 0 had arrived at this one, but will not come to the next
        with pytest.raises((DeadlineExceeded, TransportError)) as caught:
            transport.barrier()
        return str(caught.value)

    first, second = run_shared(2, give_up)
    assert "to end within 0.05 s, but not every rank took part: rank 1 (pid" in first
    assert "rank 0 (pid" in second
    assert "has given up" in second


def test_nothing_is_kept_after_close(tmp_path):
    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count("memfd:leafsum")

    before = held()
    transport = SharedMemoryTransport(0, 1, tmp_path / "rendezvous", 30.0)
    assert held()[1] == before[1] + 1
    transport.close()
    assert held() == before
    dropped = SharedMemoryTransport(0, 1, tmp_path / "rendezvous", 30.0)
    del dropped
    assert held() == before


def test_an_exception_of_a_signal_handler_ends_a_wait(pair):
    def interrupt(*_: object) -> None:
        raise KeyError("interrupted")

    main = threading.get_ident()
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        timer = threading.Timer(0.3, signal.pthread_kill, [main, signal.SIGUSR1])
        timer.start()
        with pytest.raises(KeyError, match="interrupted"):
            pair[0].barrier()
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises(TransportError, match="was refused: an earlier barrier failed"):
        pair[0].barrier()
    pair[1].barrier()  # rank 0 had arrived at this one
    with pytest.raises(TransportError, match=r"rank 0 .* has given up"):
        pair[1].barrier()


def test_another_file_at_the_store_path_stays_as_it_is(tmp_path):
    store = tmp_path / "rendezvous"
    store.write_text("something else")
    with pytest.raises(TransportError, match="has 14 bytes, not 192: it is another file, or ranks disagree"):
        SharedMemoryTransport(0, 2, store, 30.0)
    assert store.read_text() == "something else"


def test_a_store_path_serves_one_meeting(tmp_path):
    with pytest.raises(DeadlineExceeded):
        SharedMemoryTransport(0, 2, tmp_path / "rendezvous", 0.05)
    with pytest.raises(TransportError, match=r"rank 0 has come to this meeting already, as pid \d+"):
        SharedMemoryTransport(0, 2, tmp_path / "rendezvous", 30.0)
    with pytest.raises(TransportError, match=r"but rank 0 \(pid \d+\) does not hold the memory"):
        SharedMemoryTransport(1, 2, tmp_path / "rendezvous", 30.0)


def test_a_root_outside_the_gang_is_refused_and_the_mesh_goes_on():
    def ask(transport: Transport) -> bool:
        with pytest.raises(ValueError, match=r"a root of 0\.\.1, found 2"):
            transport.broadcast(torch.zeros(2), root=2)
        transport.barrier()
        return True

    assert run_shared(2, ask) == [True, True]
