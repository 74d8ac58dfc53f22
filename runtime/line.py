"""The line between a pool and its coordinator: one thread that sends for all callers, and gives each what is its own.

A caller owns an inbox. Messages for its requests, and answers to its questions, are put into it as they come, whoever
waits and whoever does not: a stream that nobody reads holds up no other. The socket is touched by this thread alone. It
is no caller's thread, because a signal handler may raise in the program's main thread between any two instructions, and
would lose another caller's message that was just being moved.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from queue import SimpleQueue
from typing import TypeAlias

import zmq

from ..ranks.control import poll
from ..ranks.messages import decode, encode
from .child import Child, end_children
from .fatal import fatal_of
from .messages import FROM_COORDINATOR, Advance, Answer, Fatal, Finished, FromCoordinator, Started, ToCoordinator

CLOSE_TIMEOUT_S = 15.0
"""How long the coordinator may take to end its ranks and leave; then SIGTERM, then SIGKILL. Its ranks die with it."""

LAST_WORDS_MS = 200
"""A death can be seen before the last message of the dead: how long to look for one."""

START_QUESTION = 0
"""Started is the answer to the first question; the others count on from it."""

GONE = Fatal(kind="RankLost", text="the coordinator is gone", role="coordinator")
"""The coordinator died without a word. Whoever holds its process knows the exit status."""

Inbox: TypeAlias = SimpleQueue[FromCoordinator | None]
"""What one caller is told. A Fatal is the end of the line; None: its owner has no more use for it."""


class Line:
    """`socket`, alone in its context, and `coordinator` pass to the line, which ends both after `leave`.

    Its thread outlives an owner that was dropped, so nobody need wait for it, and no process stays behind.
    """

    def __init__(self, socket: zmq.Socket[bytes], coordinator: Child) -> None:
        self.end: Fatal | None = None
        """Why the line ended; None while it is open."""
        self.last_heard_s = time.monotonic()
        self._context, self._socket = socket.context, socket
        self._coordinator = coordinator
        self._outbox: deque[bytes] = deque()
        self._wake = _Wake()
        self._hang_up: Fatal | None = None
        self._is_left = False
        self._of_request: dict[int, Inbox] = {}
        self._of_question: dict[int, Inbox] = {}
        self._thread = threading.Thread(target=self._run, name="leafsum-pool", daemon=True)
        self._thread.start()

    def send(self, message: ToCoordinator) -> None:
        """Queue a message; never blocks. From any thread, and from finalizers. Raises ProtocolError for its size."""
        self._outbox.append(encode(message))
        self._wake.set()

    def follow(self, inbox: Inbox, *, request_ids: Iterable[int] = (), questions: Iterable[int] = ()) -> None:
        """From now on, what is said of these goes into `inbox`. Of a line that has ended, the end does."""
        self._of_request.update(dict.fromkeys(request_ids, inbox))
        self._of_question.update(dict.fromkeys(questions, inbox))
        if self.end is not None:
            inbox.put(self.end)

    def forget(self, request_ids: Iterable[int]) -> None:
        """What is still said of these goes nowhere."""
        for request_id in request_ids:
            self._of_request.pop(request_id, None)

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
        for inbox in [*self._of_request.values(), *self._of_question.values()]:
            inbox.put(end)
        poller = zmq.Poller()
        poller.register(self._wake.fd, zmq.POLLIN)
        while not self._is_left:
            poll(poller, None)
            self._wake.clear()
        end_children([self._coordinator], CLOSE_TIMEOUT_S)
        self._context.destroy(linger=0)

    def _serve(self) -> Fatal:
        poller = zmq.Poller()
        for source in (self._socket, self._coordinator.pidfd, self._wake.fd):
            poller.register(source, zmq.POLLIN)
        while True:
            ready = poll(poller, None)
            if self._wake.fd in ready:
                self._wake.clear()
                while self._outbox:
                    self._socket.send(self._outbox.popleft())
                if self._hang_up is not None:
                    return self._hang_up
            is_gone = self._coordinator.pidfd in ready
            if self._socket in ready or (is_gone and self._socket.poll(LAST_WORDS_MS)):
                message = decode(self._socket.recv(), FROM_COORDINATOR)
                self.last_heard_s = time.monotonic()
                if isinstance(message, Fatal):
                    return message
                self._deliver(message)
            elif is_gone:
                return GONE

    def _deliver(self, message: Started | Advance | Finished | Answer) -> None:
        """Words of a request that was given up, or to a caller that was interrupted, go nowhere."""
        match message:
            case Advance():
                inbox = self._of_request.get(message.request_id)
            case Finished():
                inbox = self._of_request.pop(message.request_id, None)
            case Answer():
                inbox = self._of_question.pop(message.question, None)
            case Started():
                inbox = self._of_question.pop(START_QUESTION, None)
        if inbox is not None:
            inbox.put(message)


class _Wake:
    """Ends a wait in another thread. The descriptor is closed with the object, so none in use is ever closed."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)

    def set(self) -> None:
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        os.eventfd_read(self.fd)
