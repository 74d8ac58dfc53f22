"""The line between a pool and its coordinator: one thread that sends for all callers, and gives each what is its own.

A caller owns an inbox. Messages for its requests, and answers to its questions, are put into it as they come, whoever
waits and whoever does not: a stream that nobody reads holds up no other. The socket is touched by this thread alone;
what callers want done they queue. It is no caller's thread, because a signal handler may raise in the program's main
thread between any two instructions, and would lose another caller's message that was just being moved.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial

import zmq

from ..errors import ProtocolError
from ..ranks.control import END_TIMEOUT_S, LAST_WORDS_MS, poll
from ..ranks.messages import MAX_MESSAGE_BYTES, decode, encode
from .admission import Admission, Batch
from .child import Child, end_processes
from .fatal import fatal_of
from .inbox import Inbox
from .messages import (
    FROM_COORDINATOR,
    Advance,
    Answer,
    CatchingUp,
    Fatal,
    Finished,
    FromCoordinator,
    GangLost,
    GangRecovered,
    Started,
    ToCoordinator,
)
from .recoveries import Recoveries

CLOSE_TIMEOUT_S = 20.0
"""How long the coordinator may take to end its ranks, told, SIGTERM, SIGKILL, and leave; then it gets the same."""

START_QUESTION = 0
"""Started is the answer to the first question; the others count on from it."""

GONE = Fatal(kind="RankLost", text="the coordinator is gone", role="coordinator")
"""The coordinator died without a word. Whoever holds its process knows the exit status."""


class Line:
    """`socket`, alone in its context, and `coordinator` pass to the line, which ends both after `leave`.

    Its thread outlives an owner that was dropped, so nobody need wait for it, and no process stays behind.
    """

    def __init__(self, socket: zmq.Socket[bytes], coordinator: Child, run_id: str, queue_limit: int) -> None:
        self.end: Fatal | None = None
        """Why the line ended; None while it is open."""
        self.last_heard_s = time.monotonic()
        self.recoveries = Recoveries(run_id)
        self._context, self._socket = socket.context, socket
        self._coordinator = coordinator
        self._to_do: deque[Callable[[], object]] = deque()
        self._wake = _Wake()
        self._hang_up: Fatal | None = None
        self._is_left = False
        self._admission = Admission(queue_limit, socket.send)
        self._of_question: dict[int, Inbox] = {}
        self._thread = threading.Thread(target=self._run, name="leafsum-pool", daemon=True)
        self._thread.start()

    def ask(self, inbox: Inbox, number: int, question: ToCoordinator) -> None:
        """Queue a question; its answer comes into `inbox`. Never blocks. Raises ProtocolError for its size."""
        frame = encode(question)
        self._of_question[number] = inbox
        self._do(partial(self._socket.send, frame))
        self._tell_end(inbox)

    def admit(self, batch: Batch, request_ids: Sequence[int]) -> int:
        """As Admission's. A line that has ended takes all of them, and tells why."""
        num_admitted = len(request_ids) if self.end is not None else self._admission.admit(batch, request_ids)
        self._tell_end(batch.inbox)
        return num_admitted

    def submit(self, batch: Batch, frames: Collection[bytes], unsent: dict[int, bytes]) -> None:
        """Queue what was admitted; `unsent`, by request id, follows when there are places. Never blocks."""
        self._do(partial(self._admission.send, batch, frames, unsent))

    def go_on(self, batch: Batch, request_id: int) -> None:
        """The end of a request was read: another one may take its place. Never blocks."""
        if batch.unsent:
            self._do(partial(self._admission.go_on, batch, request_id))

    def cancel(self, batch: Batch, request_ids: Collection[int]) -> None:
        """End requests as they are. Never blocks; also for signal handlers."""
        self._do(partial(self._admission.cancel, batch, request_ids))

    def drain(self) -> None:
        """End all requests that have not begun. Never blocks; also for signal handlers."""
        self._do(self._admission.drain)

    def give_up(self, batch: Batch) -> None:
        """Nobody wants to hear of these requests any more. Never blocks and takes no lock: finalizers call it too."""
        self._do(partial(self._admission.give_up, batch))

    def hang_up(self, why: Fatal) -> None:
        """End the line; every caller that waits is told `why`. Without effect on one that has ended."""
        self._hang_up = self._hang_up or why
        self._wake.set()

    def leave(self, why: Fatal) -> None:
        """Hang up, and then end the coordinator. Never blocks and takes no lock: finalizers call it too."""
        self._is_left = True
        self.hang_up(why)
        self._coordinator.tell_to_leave()

    def join(self, timeout_s: float) -> None:
        """Wait until all that `leave` asks for is done."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            end = self._serve()
        except Exception as error:  # such as a message that is none: told to every caller, as a Fatal is
            end = fatal_of(error)
        self._socket.close()
        self.end = end  # before the inboxes: one that is registered meanwhile finds it there
        self._admission.end(end)
        for inbox in [*self._of_question.values()]:
            inbox.put(end)
        poller = zmq.Poller()
        poller.register(self._wake.fd, zmq.POLLIN)
        while not self._is_left:
            poll(poller, None)
            self._wake.clear()
        end_processes([self._coordinator], CLOSE_TIMEOUT_S)
        self._context.destroy(linger=0)

    def _serve(self) -> Fatal:
        poller = zmq.Poller()
        breaks = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        for source in (self._socket, breaks, self._coordinator.pidfd, self._wake.fd):
            poller.register(source, zmq.POLLIN)
        while True:
            ready = poll(poller, None)
            if self._wake.fd in ready:
                self._wake.clear()
                while self._to_do:
                    self._to_do.popleft()()
                if self._hang_up is not None:
                    return self._hang_up
            is_gone = self._coordinator.pidfd in ready
            if self._socket in ready or (is_gone and self._socket.poll(LAST_WORDS_MS)):
                message = self._hear()
                self.last_heard_s = time.monotonic()
                if isinstance(message, Fatal):
                    return message
                self._deliver(message)
            elif is_gone or breaks in ready:
                return self._lost()

    def _hear(self) -> FromCoordinator:
        try:
            return decode(self._socket.recv(), FROM_COORDINATOR)
        except ProtocolError as error:
            raise ProtocolError(f"the coordinator (pid {self._coordinator.pid}): {error}") from None

    def _lost(self) -> Fatal:
        """Why there is no connection any more. ZeroMQ would make it again, but what was on its way is gone.

        Exit code 0 says that the coordinator took the pool for gone: it has lost the connection too.
        """
        if self._coordinator.wait(END_TIMEOUT_S):
            return GONE
        return Fatal(
            kind=ProtocolError.__name__,
            text=f"the connection to the coordinator (pid {self._coordinator.pid}) broke: something has closed it, or "
            f"has sent what is no frame, or one above {MAX_MESSAGE_BYTES:,} bytes. The coordinator and its ranks were "
            "ended",
        )

    def _deliver(self, message: Started | Advance | CatchingUp | Finished | Answer | GangLost | GangRecovered) -> None:
        """An answer to a caller that was interrupted goes nowhere; that CatchingUp came is all that it says."""
        match message:
            case Advance() | Finished():
                self._admission.deliver(message)
            case GangLost() | GangRecovered():
                self.recoveries.take(message)
            case Answer() | Started():
                number = message.question if isinstance(message, Answer) else START_QUESTION
                inbox = self._of_question.pop(number, None)
                if inbox is not None:
                    inbox.put(message)

    def _do(self, what: Callable[[], object]) -> None:
        """Have the line's thread do it, after all that was queued before."""
        self._to_do.append(what)
        self._wake.set()

    def _tell_end(self, inbox: Inbox) -> None:
        """One that was registered when the line had ended hears nothing else."""
        if self.end is not None:
            inbox.put(self.end)


class _Wake:
    """Ends a wait in another thread. The descriptor is closed with the object, so none in use is ever closed."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)

    def set(self) -> None:
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        os.eventfd_read(self.fd)
