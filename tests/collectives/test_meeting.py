"""The barrier in shared words: who is missed, who is not, and the words themselves."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from leafsum import _C
from leafsum.collectives import meeting as meeting_module
from leafsum.collectives.meeting import FAILED, Meeting, Peers, num_words


def soon() -> float:
    return time.monotonic() + 0.05


def later() -> float:
    return time.monotonic() + 60.0


class TheseHaveEnded(Peers):
    def __init__(self, *ranks: int) -> None:
        super().__init__()
        self._ranks = set(ranks)

    def ended(self) -> set[int]:
        return self._ranks


def meetings(num_ranks: int, *ended: int) -> list[Meeting]:
    words = np.zeros(num_words(num_ranks), np.int32)
    return [Meeting(words, rank, TheseHaveEnded(*ended)) for rank in range(num_ranks)]


def test_all_meet_again_and_again():
    seats = meetings(4)

    def meet_often(seat: Meeting) -> None:
        for _ in range(500):
            seat.wait_for_all(later())

    threads = [threading.Thread(target=meet_often, args=(seat,)) for seat in seats]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [seat.generation for seat in seats] == [500] * 4


def test_a_rank_that_was_stopped_itself_is_not_late(monkeypatch):
    """As in a container that is paused: all deadlines have passed when its processes go on, and nobody was late."""
    seat = meetings(2)[0]
    at_peace = SimpleNamespace(
        MEETING_MET=_C.MEETING_MET,
        MEETING_BROKEN_OFF=_C.MEETING_BROKEN_OFF,
        meeting_pass=lambda *_: time.sleep(meeting_module._AWAY_S + 0.5),
        meeting_wait=lambda *_: _C.MEETING_MET,
    )
    monkeypatch.setattr(meeting_module, "_C", at_peace)
    seat.wait_for_all(soon())
    assert seat.generation == 1


def test_a_rank_that_has_ended_is_missed_by_name():
    seat = meetings(3, 1)[0]
    with pytest.raises(ConnectionError, match=rf"^rank 1 \(pid {os.getpid()}\) has ended; look for its error first"):
        seat.wait_for_all(soon())


def test_a_rank_that_had_arrived_before_its_end_is_not_missed():
    first, _, last = meetings(3, 1)
    _C.meeting_arrive(first._words, 1)
    thread = threading.Timer(0.3, last.wait_for_all, [later()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leafsum.collectives.meeting._LOOK_S", 0.01)  # many looks at the dead before the last one comes
        thread.start()
        first.wait_for_all(later())
        thread.join()
        with pytest.raises(ConnectionError, match=r"rank 1 .* has ended"):
            first.wait_for_all(later())


def test_a_death_is_named_before_those_who_gave_up_for_it():
    first, _, last = meetings(3, 1)
    last.leave(FAILED)
    with pytest.raises(ConnectionError, match=r"^rank 1 .* has ended;"):
        first.wait_for_all(later())


def test_ranks_that_are_late_are_named():
    first, *_ = meetings(4)
    _C.meeting_arrive(first._words, 2)
    with pytest.raises(TimeoutError, match=r"took part: rank 1 \(pid \d+\), rank 3 \(pid \d+\) did not come"):
        first.wait_for_all(soon())


def test_a_process_is_watched_until_it_ends():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    num_fds = len(os.listdir("/proc/self/fd"))
    dropped = Peers()
    dropped.watch([os.getpid(), child.pid])
    assert len(os.listdir("/proc/self/fd")) == num_fds + 1
    del dropped
    assert len(os.listdir("/proc/self/fd")) == num_fds
    peers = Peers()
    peers.watch([os.getpid(), child.pid])
    assert peers.ended() == set()
    child.communicate(b"\n")
    assert peers.ended() == {1}
    late = Peers()
    late.watch([os.getpid(), child.pid])
    assert late.ended() == {1}


def test_generations_go_on_after_two_to_the_31():
    words = np.zeros((3, 16), np.int32)
    words[0, 1] = -2  # state of generation 2^31 - 1
    words[1:, 0] = 2**31 - 1  # both ranks have come as often
    for rank, seat in enumerate([Meeting(words.ravel(), 0, Peers()), Meeting(words.ravel(), 1, Peers())]):
        seat.generation = (1 << 31) - 1
        assert _C.meeting_wait(words, seat.generation, 0.0) == _C.MEETING_WAITING
        if rank == 1:
            seat.wait_for_all(later())
            assert seat.generation == 0
        else:
            _C.meeting_arrive(words, 0)
            assert seat._has_arrived(0)
            assert not seat._has_arrived(1)
    assert (words[0, :2] == 0).all()


def test_what_ended_in_time_is_met_although_it_is_broken_off():
    words = np.zeros((2, 16), np.int32)
    _C.meeting_arrive(words, 0)
    _C.meeting_break_off(words)
    assert _C.meeting_wait(words, 0, 0.0) == _C.MEETING_MET
    assert _C.meeting_wait(words, 1, later()) == _C.MEETING_BROKEN_OFF


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: _C.meeting_arrive(np.zeros((2, 15), np.int32), 0), "words"),
        (lambda: _C.meeting_arrive(np.zeros((2, 16), np.uint32), 0), "words.*int32"),
        (lambda: _C.meeting_arrive(np.zeros((1, 16), np.int32), 0), "rows of at least one rank, "),
        (lambda: _C.meeting_arrive(np.zeros((3, 16), np.int32), 2), "rank.*0 to 1"),
        (lambda: _C.meeting_wait(np.zeros((3, 32), np.int32)[:, ::2], 0, 0.0), "words.*contiguous"),
    ],
)
def test_words_of_another_shape_are_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call()
