"""Which requests the coordinator has, and which wait in the program: at most `limit` are under way at once.

A request has a place from when it is submitted until its Finished. A call takes as many places as are free, and its
later requests take over those of its earlier ones, each when its caller has read that the earlier one has ended: so a
list of any length goes through, and a caller that reads nothing submits nothing more. Others' calls take what is free.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from ..errors import QueueFull
from ..ranks.messages import encode
from .inbox import Inbox
from .messages import Advance, Cancel, Drain, Fatal, Finished


@dataclass(eq=False, slots=True)
class Batch:
    """The requests of one call. `inbox` hears of them; all else is the line's.

    `admitted` got a place at once; `unsent` wait for one, in their order, encoded; `under_way` are at the coordinator;
    `kept` have ended, and their places wait for the caller to read that.
    """

    inbox: Inbox
    admitted: Sequence[int] = ()
    unsent: dict[int, bytes] = field(default_factory=dict)
    under_way: dict[int, None] = field(default_factory=dict)  # a set with an order
    kept: set[int] = field(default_factory=set)
    is_sent: bool = False
    is_given_up: bool = False


class Admission:
    """Callers `admit`; all else is for the line's thread, which no signal handler interrupts: no place is ever lost."""

    def __init__(self, limit: int, send: Callable[[bytes], object]) -> None:
        self._limit = limit
        self._send = send
        self._places: dict[int, Batch] = {}
        """Requests that have a place, and whose they are."""
        self._lock = threading.RLock()
        """Of callers among themselves; one may be a signal handler on top of another."""

    def admit(self, batch: Batch, request_ids: Sequence[int]) -> int:
        """Take a place for as many as are free, in order; how many. Raises QueueFull where none is."""
        with self._lock:
            num_free = self._limit - len(self._places)
            if request_ids and num_free < 1:
                raise QueueFull(
                    f"expected a free place for {len(request_ids)} more request{'s' * (len(request_ids) > 1)}, found "
                    f"all {self._limit} of queue_limit taken; nothing of this call was taken. Read or cancel what is "
                    "under way, call again when some of it has ended, or start the pool with a higher queue_limit "
                    "(--queue-limit)"
                )
            batch.admitted = request_ids[:num_free]
            self._places.update(dict.fromkeys(batch.admitted, batch))
            return len(batch.admitted)

    def send(self, batch: Batch, frames: Collection[bytes], unsent: dict[int, bytes]) -> None:
        """Submit what was admitted, as `frames`; the others follow by and by."""
        batch.is_sent = True
        batch.under_way = dict.fromkeys(batch.admitted)
        batch.unsent = unsent
        for frame in frames:
            self._send(frame)

    def deliver(self, word: Advance | Finished) -> None:
        """Words of a request that was given up go nowhere."""
        batch = self._places.get(word.request_id)
        if batch is None or word.request_id not in batch.under_way:
            return
        if isinstance(word, Finished):
            del batch.under_way[word.request_id]
            if batch.unsent:
                batch.kept.add(word.request_id)
            else:
                del self._places[word.request_id]
        if not batch.is_given_up:
            batch.inbox.put(word)

    def go_on(self, batch: Batch, request_id: int) -> None:
        """The caller has read the end of a request: its place is the next one's."""
        if request_id not in batch.kept:
            return
        next_id = next(iter(batch.unsent))  # there is one as long as places are kept
        self._places[next_id] = batch  # before the other is free: nobody else may take it meanwhile
        batch.under_way[next_id] = None
        batch.kept.remove(request_id)
        del self._places[request_id]
        self._send(batch.unsent.pop(next_id))
        self._free_kept(batch)

    def cancel(self, batch: Batch, request_ids: Collection[int]) -> None:
        """End these as they are. What was not submitted yet ends here; the coordinator does not know it."""
        for request_id in request_ids:
            if batch.unsent.pop(request_id, None) is not None:
                batch.inbox.put(cancelled_unsent(request_id))
        self._free_kept(batch)
        self._tell_to_cancel([request_id for request_id in request_ids if request_id in batch.under_way])

    def drain(self) -> None:
        """End what has not begun: here what was not submitted yet, at the coordinator what waits there."""
        for batch in dict.fromkeys([*self._places.values()]):
            self.cancel(batch, [*batch.unsent])
        self._send(encode(Drain()))

    def give_up(self, batch: Batch) -> None:
        """The caller wants no more. Its requests have their places until the coordinator has ended them."""
        batch.is_given_up = True
        batch.unsent.clear()
        self._free_kept(batch)
        if batch.is_sent:
            self._tell_to_cancel([*batch.under_way])
        else:  # it was interrupted before
            for request_id in batch.admitted:
                self._places.pop(request_id, None)

    def end(self, why: Fatal) -> None:
        """The end of the line, to every call that has something under way."""
        for batch in dict.fromkeys([*self._places.values()]):
            batch.inbox.put(why)

    def _free_kept(self, batch: Batch) -> None:
        if not batch.unsent:
            for request_id in batch.kept:
                del self._places[request_id]
            batch.kept.clear()

    def _tell_to_cancel(self, request_ids: Sequence[int]) -> None:
        if request_ids:
            self._send(encode(Cancel(request_ids=tuple(request_ids))))


def cancelled_unsent(request_id: int) -> Finished:
    """No rank ever had to do with it."""
    return Finished(
        request_id=request_id, reason="cancelled", num_output_tokens=0, residual_hash=0, logits_sha256="", error=""
    )
