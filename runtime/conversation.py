"""A pool's end of the conversation with its coordinator: the process, the line to it, its run folder, and their end."""

from __future__ import annotations

import itertools
import math
import os
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec
import zmq

from ..errors import LeafsumError, PoolClosed
from ..ranks.control import AWAY_S, open_socket
from ..ranks.messages import encode
from .admission import Batch
from .child import KILL_TIMEOUT_S, LIMITS_HINT, TERMINATE_TIMEOUT_S, Child, describe_exit, end_processes
from .fatal import error_of
from .inbox import Inbox, Word
from .line import CLOSE_TIMEOUT_S, GONE, START_QUESTION, Line
from .messages import Advance, Answer, Fatal, Finished, Order, Started, Submit, ToCoordinator
from .recoveries import Recovery
from .run_folder import RunFolder

END_TIMEOUT_S = CLOSE_TIMEOUT_S + TERMINATE_TIMEOUT_S + KILL_TIMEOUT_S
"""The longest that the line may take to end the coordinator."""

GRACE_S = 30.0
"""How much later than the coordinator's deadlines the pool's are: the coordinator can say who is late."""

SUBMIT_TOKENS = 2**20
"""What one message may weigh: its tokens and characters, and ORDER_WEIGHT a request. A frame carries six times as
many."""

ORDER_WEIGHT = 16

TELL_TIMEOUT_S = 1.0
"""How long a log may take for the events of a pool that is closed."""

CLOSED = "this pool is closed; make a new one"
CLOSED_MEANWHILE = Fatal(kind=PoolClosed.__name__, text="this pool was closed by another thread")


class Conversation:
    """One coordinator. It ends with `close`, with this object, or with the program. Any thread may use it."""

    def __init__(self, log_level: str, queue_limit: int) -> None:
        self._owner_pid = os.getpid()
        self._close_lock = threading.RLock()
        self._closing_thread = 0
        self._is_closed = False
        self._questions = itertools.count(START_QUESTION)
        self._coordinator: Child | None = None
        self._line: Line | None = None
        self.run_folder = RunFolder.make()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._open(log_level, queue_limit)
        except BaseException as error:
            # Ctrl-C may come before pyzmq lists a new socket: close() would wait for it, and only a frame holds it
            traceback.clear_frames(error.__traceback__)
            self.close()
            raise

    def _open(self, log_level: str, queue_limit: int) -> None:
        try:
            socket = open_socket(self._context, zmq.PAIR, self.run_folder.host_socket, bind=False)
            arguments = ["--run-folder", str(self.run_folder.path), "--run-id", self.run_folder.run_id]
            arguments += ["--log-level", log_level]
            self._coordinator = Child("coordinator", "leafsum.runtime.coordinator", arguments)
            self._line = Line(socket, self._coordinator, self.run_folder.run_id, queue_limit)
            dropped = weakref.finalize(self, _let_go, self._line, self._owner_pid)
            dropped.atexit = False  # the coordinator sees the program's end by itself
        except (OSError, zmq.ZMQError) as error:
            raise LeafsumError(f"cannot start the coordinator: {error.strerror}. {LIMITS_HINT}") from error

    def require_open(self) -> tuple[Child, Line]:
        """The coordinator, and the line to it.

        Raises PoolClosed once the conversation was closed, and in a forked copy of the program.
        """
        self._refuse_forked_copy()
        if self._coordinator is None or self._line is None or self._closing_thread:
            raise PoolClosed(CLOSED)
        return self._coordinator, self._line

    @property
    def is_open(self) -> bool:
        return not self._closing_thread and self._owner_pid == os.getpid()

    @property
    def recoveries(self) -> tuple[Recovery, ...]:
        return self._line.recoveries.newest if self._line is not None else ()

    def submit(self, orders: Sequence[Order], batch: Batch) -> None:
        """Send requests off, as many as there are places for; the others follow as those end and are read to have.

        Raises QueueFull where no place is free, ProtocolError for an order that is too large; then none was sent.
        """
        _, line = self.require_open()
        num_admitted = line.admit(batch, [order.request_id for order in orders])
        frames = [encode(submit) for submit in submits(orders[:num_admitted])]
        unsent = {order.request_id: encode(Submit(orders=(order,))) for order in orders[num_admitted:]}
        line.submit(batch, frames, unsent)

    def go_on(self, batch: Batch, request_id: int) -> None:
        """A Finished was read: another request of the batch may be submitted."""
        if self._line is not None and self.is_open:
            self._line.go_on(batch, request_id)

    def cancel(self, batch: Batch, request_ids: Collection[int]) -> None:
        """End requests as they are; their Finished comes. In a pool that is closed, nothing is left to cancel."""
        if self._line is not None and self.is_open and request_ids:
            self._line.cancel(batch, request_ids)

    def drain(self) -> None:
        """End what has not begun. Raises PoolClosed."""
        self.require_open()[1].drain()

    def give_up(self, batch: Batch) -> None:
        """Cancel what is left, and hear no more of it. Takes no lock: it may run wherever an object is dropped."""
        if self._line is not None and self.is_open:
            self._line.give_up(batch)

    def ask(self, question: Callable[[int], ToCoordinator], timeout_s: float) -> Started | Answer:
        """Send the question that is made with a number, and wait for its answer."""
        _, line = self.require_open()
        number, inbox = next(self._questions), Inbox()
        line.ask(inbox, number, question(number))
        answer = self.receive(inbox, timeout_s)
        if not isinstance(answer, Started | Answer):
            raise LeafsumError(f"expected the answer to question {number}, got {type(answer).__name__}")
        return answer

    def receive(self, inbox: Inbox, timeout_s: float) -> Started | Advance | Finished | Answer | None:
        """The next message in `inbox`, when there is one.

        The coordinator's Fatal, its death, and its silence for `timeout_s` while this waits are raised here and in
        every other call that waits, and end the conversation. A gang that is started again gives it longer.
        """
        patience = self._patience(timeout_s)
        while True:
            try:
                word = inbox.get(patience.left_s())
            except queue.Empty:
                continue
            if isinstance(word, Fatal):
                self.close()
            return self._said(word)

    async def areceive(self, inbox: Inbox, timeout_s: float) -> Started | Advance | Finished | Answer | None:
        """As `receive`, for a task: its event loop goes on meanwhile, also while the conversation ends."""
        from asyncio import to_thread  # slow to import, and a program with a loop has it

        patience = self._patience(timeout_s)
        while True:
            try:
                word = await inbox.aget(patience.left_s())
            except queue.Empty:
                continue
            if isinstance(word, Fatal):
                await to_thread(self.close)
            return self._said(word)

    def _patience(self, timeout_s: float) -> _Patience:
        self._refuse_forked_copy()
        assert self._coordinator is not None, "nothing was sent without one"
        assert self._line is not None, "nothing was sent without one"
        return _Patience(self._line, self._coordinator, timeout_s + GRACE_S)

    def _said(self, word: Word) -> Started | Advance | Finished | Answer | None:
        if isinstance(word, Fatal):
            assert self._coordinator is not None, "it has spoken"
            raise self._error_of(word, self._coordinator)
        return word

    def _refuse_forked_copy(self) -> None:
        if self._owner_pid != os.getpid():
            raise PoolClosed(
                f"this pool belongs to process {self._owner_pid}, and this is a forked copy of it, which has neither "
                "the pool's thread nor its processes. Make a WorkerPool after the fork, in the process that uses it, "
                'or start processes with the "spawn" method'
            )

    def _error_of(self, end: Fatal, coordinator: Child) -> LeafsumError:
        if end is CLOSED_MEANWHILE and self._closing_thread == threading.get_ident():
            return PoolClosed(CLOSED)
        if end is GONE:
            exit_status = coordinator.exit_status()
            text = f"the coordinator (pid {coordinator.pid}) is gone: {describe_exit(exit_status)}"
            end = msgspec.structs.replace(end, text=f"{text}; its ranks ended with it", exit_status=exit_status)
        return error_of(end)

    def close(self) -> None:
        """End the coordinator and with it every rank, within a bound, and remove the run folder. Safe to call again.

        From any thread: one that waits for an answer meanwhile gets PoolClosed.
        """
        if self._owner_pid != os.getpid():
            return  # the program's, not a forked copy's
        self._closing_thread = self._closing_thread or threading.get_ident()
        if self._line is not None:
            self._line.leave(CLOSED_MEANWHILE)
        with self._close_lock:
            if self._is_closed:
                return
            if self._line is not None:
                self._line.join(END_TIMEOUT_S)
            elif self._coordinator is not None:
                end_processes([self._coordinator], CLOSE_TIMEOUT_S)
            self._context.destroy(linger=0)
            self.run_folder.remove()
            self._is_closed = True
        if self._line is not None:
            self._line.recoveries.wait_told(TELL_TIMEOUT_S)


class _Patience:
    """How long one call waits for the coordinator's next word: `limit_s` since it began to, or since the last word.

    It may be a word to others: a request that waits behind another for longer than a step is no fault.
    """

    def __init__(self, line: Line, coordinator: Child, limit_s: float) -> None:
        self._line = line
        self._coordinator = coordinator
        self._limit_s = limit_s
        self._begin_s = time.monotonic()
        self._due_s = math.inf

    def left_s(self) -> float:
        """The rest of it. Where nothing is left, the line is ended: what comes next is its end."""
        now_s = time.monotonic()
        if now_s > self._due_s + AWAY_S:
            self._begin_s = now_s
        limit_s = self._limit_s + self._line.recoveries.allowance_s
        left_s = max(self._begin_s, self._line.last_heard_s) + limit_s - now_s
        if left_s > 0.0:
            left_s = min(left_s, self._limit_s)  # and look again: the gang may be there before its time
            self._due_s = now_s + left_s
            return left_s
        self._line.hang_up(silence(self._coordinator, limit_s))
        return limit_s


def _let_go(line: Line, owner_pid: int) -> None:
    """A conversation that nobody closed: its line ends the coordinator. A forked copy's drop is not the program's."""
    if owner_pid == os.getpid():
        line.leave(CLOSED_MEANWHILE)


def silence(coordinator: Child, limit_s: float) -> Fatal:
    text = f"waited {limit_s:g} s for a word of the coordinator (pid {coordinator.pid}, {coordinator.state()})"
    return Fatal(
        kind="DeadlineExceeded", text=f"{text}; it and its ranks were ended", what="coordinator", timeout_s=limit_s
    )


def submits(orders: Sequence[Order]) -> Iterator[Submit]:
    """As few messages as carry the orders: each weighs at most SUBMIT_TOKENS, or is one order."""
    batch: list[Order] = []
    weight = 0
    for order in orders:
        order_weight = len(order.token_ids) + len(order.stop_ids) + sum(map(len, order.stop_strings)) + ORDER_WEIGHT
        if batch and weight + order_weight > SUBMIT_TOKENS:
            yield Submit(orders=tuple(batch))
            batch, weight = [], 0
        batch.append(order)
        weight += order_weight
    if batch:
        yield Submit(orders=tuple(batch))
