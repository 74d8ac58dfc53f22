"""A pool's end of the conversation with its coordinator: the process, its socket, its run folder, and their end."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence

import zmq

from ..errors import DeadlineExceeded, LeafsumError, PoolClosed, RankLost
from ..ranks.control import open_socket, poll
from ..ranks.messages import decode, encode
from .child import Child, describe_exit, end_children
from .fatal import error_of
from .messages import FROM_COORDINATOR, Advance, Answer, Fatal, Finished, FromCoordinator, Order, Submit, ToCoordinator
from .run_folder import RunFolder

CLOSE_TIMEOUT_S = 15.0
"""How long the coordinator may take to end its ranks and leave; then SIGTERM, then SIGKILL. Its ranks die with it."""

GRACE_S = 30.0
"""How much later than the coordinator's deadlines the pool's are: the coordinator can say who is late."""

LAST_WORDS_MS = 200
"""A death can be seen before the last message of the dead: how long to look for one."""

SUBMIT_TOKENS = 2**20
"""What one message may weigh: its prompt tokens, and ORDER_WEIGHT a request. A frame carries six times as many."""

ORDER_WEIGHT = 16

CLOSED = "this pool is closed; make a new one"


class Conversation:
    """One coordinator. It ends with `close`, with this object, or with the program.

    A thread holds `turn` while it asks and waits: sockets are not for two threads, and answers not for another.
    """

    def __init__(self, log_level: str) -> None:
        self.turn = threading.RLock()
        self._owner_pid = os.getpid()
        self._closing = False
        self.run_folder = RunFolder.make()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._question = 0
        self._coordinator: Child | None = None
        try:
            self._socket = open_socket(self._context, zmq.PAIR, self.run_folder.host_socket, bind=False)
            arguments = ["--run-folder", str(self.run_folder.path), "--run-id", self.run_folder.run_id]
            arguments += ["--log-level", log_level]
            self._coordinator = Child("coordinator", "leafsum.runtime.coordinator", arguments)
        except BaseException:
            self.close()
            raise

    def require_open(self) -> Child:
        """The coordinator. Raises PoolClosed once the conversation has ended, and in a forked copy of the program."""
        if self._owner_pid != os.getpid():
            raise PoolClosed(f"this pool belongs to process {self._owner_pid}; a forked copy must make its own")
        if self._coordinator is None:
            raise PoolClosed(CLOSED)
        return self._coordinator

    @property
    def is_open(self) -> bool:
        return self._coordinator is not None

    def send(self, message: ToCoordinator) -> None:
        """Queue a message; never blocks. Raises PoolClosed."""
        self.require_open()
        self._socket.send(encode(message))

    def submit(self, orders: Sequence[Order]) -> None:
        for submit in submits(orders):
            self.send(submit)

    def next_question(self) -> int:
        self._question += 1
        return self._question

    def answer(self, question: int, timeout_s: float) -> Answer:
        """The answer to one question. Answers to questions whose asker was interrupted are passed over."""
        while True:
            message = self.receive(timeout_s)
            if isinstance(message, Answer) and message.question == question:
                return message
            if not isinstance(message, Answer | Advance | Finished):
                raise LeafsumError(f"expected the answer to question {question}, got {type(message).__name__}")

    def receive(self, timeout_s: float) -> FromCoordinator:
        """The coordinator's next word. Its Fatal, its death and the deadline are raised, and end the conversation."""
        coordinator = self.require_open()
        poller = zmq.Poller()
        for source in (self._socket, coordinator.pidfd):
            poller.register(source, zmq.POLLIN)
        ready = poll(poller, timeout_s + GRACE_S)
        if self._socket in ready or (ready and self._socket.poll(LAST_WORDS_MS)):
            message = decode(self._socket.recv(), FROM_COORDINATOR)
            if not isinstance(message, Fatal):
                return message
            self.close()
            raise error_of(message)
        if self._closing:
            raise PoolClosed("this pool was closed by another thread")
        exit_status, state = coordinator.exit_status(), coordinator.state()
        self.close()
        if ready:
            raise RankLost(
                f"the coordinator (pid {coordinator.pid}) is gone: {describe_exit(exit_status)}; "
                "its ranks ended with it",
                role="coordinator",
                exit_status=exit_status,
            )
        raise DeadlineExceeded(
            f"waited {timeout_s + GRACE_S:g} s for a word of the coordinator (pid {coordinator.pid}, {state}); "
            "it and its ranks were ended",
            what="coordinator",
            timeout_s=timeout_s + GRACE_S,
        )

    def close(self) -> None:
        """End the coordinator and with it every rank, within a bound, and remove the run folder. Safe to call again.

        From any thread: one that waits for an answer meanwhile gets PoolClosed.
        """
        if self._owner_pid != os.getpid():
            return  # the program's, not a forked copy's
        self._closing = True
        if self._coordinator is not None:
            self._coordinator.tell_to_leave()  # its exit is what wakes a thread that holds the turn
        with self.turn:
            if self._coordinator is not None:
                end_children([self._coordinator], CLOSE_TIMEOUT_S)
                self._coordinator = None
            self._context.destroy(linger=0)
            self.run_folder.remove()


def submits(orders: Sequence[Order]) -> Iterator[Submit]:
    """As few messages as carry the orders: each weighs at most SUBMIT_TOKENS, or is one order."""
    batch: list[Order] = []
    weight = 0
    for order in orders:
        order_weight = len(order.token_ids) + len(order.stop_ids) + ORDER_WEIGHT
        if batch and weight + order_weight > SUBMIT_TOKENS:
            yield Submit(orders=tuple(batch))
            batch, weight = [], 0
        batch.append(order)
        weight += order_weight
    if batch:
        yield Submit(orders=tuple(batch))
