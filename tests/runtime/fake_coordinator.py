"""A coordinator that the test plays, at the other end of a pool's conversation; its process is a stand-in."""

import os
import threading
from pathlib import Path

import zmq
from leafsum.ranks.control import open_socket
from leafsum.ranks.messages import decode, encode
from leafsum.runtime import conversation as conversation_module
from leafsum.runtime.child import Child
from leafsum.runtime.conversation import Conversation
from leafsum.runtime.messages import TO_COORDINATOR, Advance, Answer, AskWitness, Finished, Message, ToCoordinator
from leafsum.runtime.open_request import OpenRequest
from leafsum.runtime.sampling import SamplingParams
from leafsum.runtime.stream import Stream
from runtime.small_tokenizers import tiny

TESTS = Path(__file__).resolve().parent.parent
WAIT_S = 60.0


class FakeCoordinator:
    """The other end of a conversation: hears what was submitted, and answers what the test wants."""

    def __init__(self, monkeypatch, queue_limit: int = 1024) -> None:
        monkeypatch.setattr(conversation_module, "Child", self._stand_in)
        self.conversation = Conversation("warning", queue_limit)
        self.child: Child = self.conversation.require_open()[0]
        self._context: zmq.Context = zmq.Context()
        self._socket = open_socket(self._context, zmq.PAIR, self.conversation.run_folder.host_socket, bind=True)
        self._num_requests = 0
        self._numbering = threading.Lock()
        self.unread: Stream

    def _stand_in(self, role: str, _module: str, _arguments: list[str]) -> Child:
        return Child(role, "stand_in", ["polite"], env={**os.environ, "PYTHONPATH": str(TESTS)})

    def stream(self, num_prompts: int = 1, timeout_s: float = WAIT_S, **sampling: object) -> Stream:
        with self._numbering:
            first = self._num_requests
            self._num_requests += num_prompts
        params = SamplingParams(**sampling)
        requests = [OpenRequest(index, first + index, None, (1,), params) for index in range(num_prompts)]
        orders = [request.order(()) for request in requests]
        return Stream(self.conversation, tiny(), requests, orders, step_timeout_s=timeout_s)

    def say(self, *messages: Message) -> None:
        for message in messages:
            self._socket.send(encode(message))

    def say_text(self, request_id: int, text: str) -> None:
        self.say(*(Advance(request_id=request_id, num_prompt_rows=0, token_ids=(byte,)) for byte in text.encode()))

    def finish(self, request_id: int, num_tokens: int, reason: str = "length", stop_string: str = "") -> None:
        self.say(finished(request_id, num_tokens, reason, stop_string))

    def hear(self) -> ToCoordinator:
        assert self._socket.poll(WAIT_S * 1000), "the coordinator heard nothing"
        return decode(self._socket.recv(), TO_COORDINATOR)

    def hears_nothing(self) -> bool:
        """A question makes sure that all sent before it has come."""
        asking = threading.Thread(target=self.conversation.ask, args=(ask, WAIT_S))
        asking.start()
        heard = self.hear()
        if isinstance(heard, AskWitness):
            self.say(answer(heard.question))
            asking.join(WAIT_S)
        return isinstance(heard, AskWitness)

    def break_connection(self) -> None:
        self._socket.close(linger=0)

    def close(self) -> None:
        self.conversation.close()
        self._context.destroy(linger=0)


def ask(question: int) -> AskWitness:
    return AskWitness(question=question)


def answer(question: int, num_steps: int = 0) -> Answer:
    return Answer(question=question, error="", num_steps=num_steps, most_rows=0, most_live_requests=0, ranks=())


def finished(request_id: int, num_tokens: int, reason: str = "length", stop_string: str = "") -> Finished:
    return Finished(
        request_id=request_id,
        reason=reason,  # type: ignore[arg-type]
        num_output_tokens=num_tokens,
        residual_hash=7,
        logits_sha256="",
        error="",
        stop_string=stop_string,
        num_ranks=3,
    )


class Caller(threading.Thread):
    """A call in a thread of its own, and what it came to."""

    def __init__(self, call) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._outcome: list[object] = []
        self.start()

    def run(self) -> None:
        try:
            self._outcome.append(self._call())
        except Exception as error:
            self._outcome.append(error)

    def outcome(self):
        self.join(WAIT_S)
        assert self._outcome, "the call goes on"
        return self._outcome[0]
