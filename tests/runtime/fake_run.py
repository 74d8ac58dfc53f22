"""A coordinator in a thread, between a pool and three ranks that the test plays; the ranks' processes are stand-ins."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
from leafsum.errors import LeafsumError
from leafsum.ranks.control import open_socket, rank_identity
from leafsum.ranks.messages import (
    PROTOCOL_VERSION,
    TO_RANK,
    Failure,
    FromRank,
    Hello,
    Message,
    Plan,
    Ready,
    Run,
    RunResult,
    Setup,
    StepResult,
    ToRank,
    Traffic,
    decode,
    encode,
)
from leafsum.runtime import launcher as launcher_module
from leafsum.runtime.child import Child
from leafsum.runtime.coordinator import Coordinator
from leafsum.runtime.fatal import error_of
from leafsum.runtime.launcher import Spawner
from leafsum.runtime.messages import FROM_COORDINATOR, Advance, Fatal, FromCoordinator, Order, Started, Submit
from leafsum.runtime.run_folder import RunFolder
from leafsum.runtime.settings import Settings
from processes import all_gone
from setups import MODEL_DIGEST, RUN_ID, make_start

TESTS = Path(__file__).resolve().parent.parent
NUM_RANKS = 3
WAIT_S = 60.0
LAST_WORD_MS = 1000
"""How long after a coordinator's end a word of it may still be on its way, where its last was no Fatal."""

TOKEN_OF_STEP = 40
"""Fake ranks draw token 40 + step."""

FIRST_TOKEN = Advance(request_id=0, num_prompt_rows=2, token_ids=(TOKEN_OF_STEP + 1,))
SECOND_PLAN = Plan(step=2, releases=(), admits=(), runs=(Run(slot=0, start=2, token_ids=(), decides=True),))


class FakeRank:
    """The socket of one rank, and the stand-in process that the gang believes to be behind it."""

    def __init__(self, context: zmq.Context, folder: RunFolder, rank: int, gang: int = 0) -> None:
        self.rank = rank
        self.identity = rank_identity(folder.run_id, rank)
        self.socket = open_socket(context, zmq.DEALER, folder.ranks_socket(gang), bind=False, identity=self.identity)
        self.child: Child

    def say(self, message: FromRank) -> None:
        self.say_bytes(encode(message))

    def say_bytes(self, frame: bytes) -> None:
        self.socket.send(frame)

    def hear(self) -> ToRank:
        assert self.socket.poll(WAIT_S * 1000), f"rank {self.rank} heard nothing"
        return decode(self.socket.recv(), TO_RANK)

    def hear_plan(self) -> Plan:
        plan = self.hear()
        assert isinstance(plan, Plan)
        return plan

    def hello(self, **changes: object) -> Hello:
        return changed(Hello(protocol=PROTOCOL_VERSION, run_id=RUN_ID, rank=self.rank, pid=os.getpid()), **changes)

    def ready(self, **changes: object) -> Ready:
        ready = Ready(
            rank=self.rank,
            device="cpu: one",
            model_digest=MODEL_DIGEST,
            settings_digest=Settings().digest(),
            exchange="nodes",
            transport="shared",
            num_threads=1,
            poison=False,
            versions={"torch": "2"},
        )
        return changed(ready, **changes)

    def result(self, plan: Plan) -> StepResult:
        """What an honest rank answers. Only the traffic may differ between ranks."""
        runs = tuple(
            RunResult(
                slot=run.slot,
                token_id=TOKEN_OF_STEP + plan.step if run.decides else -1,
                residual_hash=2**64 - plan.step,
                bad_layer=-1,
                bad_position=-1,
                logits_sha256="ab" * 32,
            )
            for run in plan.runs
        )
        traffic = Traffic(calls={"all_gather": plan.step}, bytes_sent=self.rank, bytes_received=9, num_exchanges=4)
        return StepResult(rank=self.rank, step=plan.step, runs=runs, traffic=traffic)

    def failure(self, kind: str = "ValueError", step: int = 2, transport: bool = False) -> Failure:
        text, trace = f"rank {self.rank} says why", f"Traceback of rank {self.rank}"
        return Failure(rank=self.rank, step=step, kind=kind, text=text, traceback_text=trace, transport=transport)


def changed(message, **changes):
    return msgspec.structs.replace(message, **changes)


class FakeRun:
    """`manners` are those of the stand-ins (tests/stand_in.py), one for each rank."""

    def __init__(self, path: Path, monkeypatch, manners: tuple[str, ...] = (), **settings: Any) -> None:
        self.folder = RunFolder(path, RUN_ID)
        self.settings = Settings(**{"tp": NUM_RANKS, "step_timeout_s": WAIT_S, "recover": "never", **settings})
        self.context: zmq.Context = zmq.Context()
        self.pool = open_socket(self.context, zmq.PAIR, self.folder.host_socket, bind=False)
        self.ranks = [FakeRank(self.context, self.folder, rank) for rank in range(NUM_RANKS)]
        self._lost_ranks: list[FakeRank] = []
        self.said: list[FromCoordinator] = []
        """What the pool has heard, Started left out."""
        self.children: list[Child] = []
        self._manners = manners
        self._death_read_fd, self._death_write_fd = os.pipe()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        monkeypatch.setattr(launcher_module, "Child", self._stand_in)

    def _stand_in(
        self, role: str, module: str, arguments: list[str], env: dict[str, str], grandparent_death_fd: int
    ) -> Child:
        assert (module, grandparent_death_fd) == ("leafsum.ranks.worker", self._death_read_fd)
        rank = int(arguments[arguments.index("--rank") + 1])
        manner = self._manners[rank] if self._manners else "polite"
        child = Child(role, "stand_in", [manner], env={**env, "PYTHONPATH": str(TESTS)})
        self.ranks[rank].child = child
        self.children.append(child)
        return child

    def await_gang(self, number: int, num_ranks: int = NUM_RANKS) -> None:
        """Play the ranks of the gang that is about to be started, instead of those of the lost one."""
        self._lost_ranks += self.ranks
        self.ranks = [FakeRank(self.context, self.folder, rank, number) for rank in range(num_ranks)]

    def _serve(self) -> None:
        fd = self._death_read_fd
        Coordinator(self.folder, fd, Spawner(RUN_ID, "warning", fd)).run()

    def launch(self) -> None:
        """The coordinator is up and has the pool's Start; no rank has spoken yet."""
        self._thread.start()
        self.tell(make_start(self.settings))

    def start(self) -> None:
        """All ranks are set up and ready."""
        self.launch()
        self.come_up()
        assert self.hear() == Started()

    def come_up(self) -> list[Setup]:
        """All ranks of the gang say their first words; what each was told."""
        for rank in self.ranks:
            rank.say(rank.hello())
        setups = []
        for rank in self.ranks:
            setup = rank.hear()
            assert isinstance(setup, Setup)
            assert setup.rank == rank.rank
            setups.append(setup)
            rank.say(rank.ready())
        return setups

    def first_step(self) -> None:
        """One request of two tokens: all ranks do the first step, which draws a token."""
        self.submit()
        for rank in self.ranks:
            rank.say(rank.result(rank.hear_plan()))
        self.said.append(self.hear())
        assert self.said == [FIRST_TOKEN]

    def second_step(self) -> None:
        """The first step is done, and the second is under way."""
        self.start()
        self.first_step()
        for rank in self.ranks:
            assert rank.hear_plan() == SECOND_PLAN

    def answer(self, *but: int) -> None:
        """The honest results of the second step, of all ranks but some."""
        for rank in self.ranks:
            if rank.rank not in but:
                rank.say(rank.result(SECOND_PLAN))

    def submit(self, request_id: int = 0, max_tokens: int = 8) -> None:
        order = Order(request_id=request_id, token_ids=(1, 2), max_tokens=max_tokens, stop_ids=())
        self.tell(Submit(orders=(order,)))

    def tell(self, message: Message) -> None:
        self.pool.send(encode(message))

    def hear(self) -> FromCoordinator:
        assert self.pool.poll(WAIT_S * 1000), "the pool heard nothing"
        return decode(self.pool.recv(), FROM_COORDINATOR)

    def outcome(self) -> list[FromCoordinator]:
        """All that the pool hears until the coordinator has ended."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the coordinator goes on"
        while not any(isinstance(message, Fatal) for message in self.said) and self.pool.poll(LAST_WORD_MS):
            self.said.append(decode(self.pool.recv(), FROM_COORDINATOR))
        return self.said

    def error(self, *, after: Sequence[FromCoordinator]) -> LeafsumError:
        """The error that the pool raises: all it heard before is `after`, and no process or file is left."""
        *told, fatal = self.outcome()
        assert told == list(after)
        assert isinstance(fatal, Fatal)
        assert all_gone(child.pid for child in self.children)
        assert not self.folder.path.exists()
        return error_of(fatal)

    def close_pool(self) -> None:
        """What the coordinator sees when its pool closes or its program dies."""
        if self._death_write_fd >= 0:
            os.close(self._death_write_fd)
            self._death_write_fd = -1

    def close(self) -> None:
        self.close_pool()
        if self._thread.ident is not None:
            self._thread.join(WAIT_S)
        os.close(self._death_read_fd)
        self.context.destroy(linger=0)
