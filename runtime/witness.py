"""What a pool can tell of a run: how far it is, and counts that prove what ran."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..errors import LeafsumError
from .messages import Answer, RankReport


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one `generate` call is."""

    finished_prompts: int
    total_prompts: int
    prompt_tokens_done: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class RankWitness:
    """What one rank has done since it started. `transport`: collective calls by kind; bytes are payload on the wire.

    `wait_ns`: nanoseconds in those calls, moving bytes and waiting for other ranks; `exchange_ns`: in whole exchanges,
    these calls and what is done around them because there are other ranks. `hazards`: how often its rows met
    what a careless sum would treat otherwise, by name. `num_delays`: its sleeps before calls, which a receipt asks for.
    `cpu_ns`: CPU time of all threads of its process, `kernel_cpu_ns`: what its kernels used of it.
    `exchange_mode`, `transport_name`, `num_threads` and `poison`: what the rank said that it does, as in its Ready.
    """

    rank: int
    pid: int
    exchanges: int
    bytes_sent: int
    bytes_received: int
    transport: dict[str, int]
    exchange_mode: str
    transport_name: str
    num_threads: int
    poison: bool
    num_delays: int = 0
    wait_ns: int = 0
    exchange_ns: int = 0
    hazards: dict[str, int] = field(default_factory=dict)
    cpu_ns: int = 0
    kernel_cpu_ns: int = 0

    @classmethod
    def of(cls, report: RankReport) -> RankWitness:
        traffic = report.traffic
        return cls(
            rank=report.rank,
            pid=report.pid,
            exchanges=traffic.num_exchanges,
            bytes_sent=traffic.bytes_sent,
            bytes_received=traffic.bytes_received,
            transport=traffic.calls,
            exchange_mode=report.ready.exchange,
            transport_name=report.ready.transport,
            num_threads=report.ready.num_threads,
            poison=report.ready.poison,
            num_delays=traffic.num_delays,
            wait_ns=traffic.wait_ns,
            exchange_ns=traffic.exchange_ns,
            hazards=traffic.hazards,
            cpu_ns=traffic.cpu_ns,
            kernel_cpu_ns=traffic.kernel_cpu_ns,
        )

    def since(self, before: RankWitness) -> RankWitness:
        return replace(
            self,
            exchanges=self.exchanges - before.exchanges,
            bytes_sent=self.bytes_sent - before.bytes_sent,
            bytes_received=self.bytes_received - before.bytes_received,
            transport=_difference(self.transport, before.transport),
            num_delays=self.num_delays - before.num_delays,
            wait_ns=self.wait_ns - before.wait_ns,
            exchange_ns=self.exchange_ns - before.exchange_ns,
            hazards=_difference(self.hazards, before.hazards),
            cpu_ns=self.cpu_ns - before.cpu_ns,
            kernel_cpu_ns=self.kernel_cpu_ns - before.kernel_cpu_ns,
        )


def _difference(now: dict[str, int], then: dict[str, int]) -> dict[str, int]:
    return {name: count - then.get(name, 0) for name, count in now.items()}


@dataclass(frozen=True, slots=True)
class Witness:
    """Counts of the whole run; `most_rows` and `most_live_requests` count since the last `reconfigure`, and those of
    `ranks` since their gang was started.
    """

    steps: int
    most_rows: int
    most_live_requests: int
    ranks: tuple[RankWitness, ...]

    @classmethod
    def of(cls, answer: Answer) -> Witness:
        return cls(
            steps=answer.num_steps,
            most_rows=answer.most_rows,
            most_live_requests=answer.most_live_requests,
            ranks=tuple(RankWitness.of(report) for report in answer.ranks),
        )

    def since(self, before: Witness) -> Witness:
        """What was counted after `before`, a witness of the same pool; the two most_* stay as they are.

        Raises LeafsumError where a gang was lost in between, and its counts with it.
        """
        if [rank.pid for rank in before.ranks] != [rank.pid for rank in self.ranks]:
            raise LeafsumError(
                "expected two witnesses of the same rank processes, found other process ids: a gang was started again "
                'in between, and what the lost one had counted is gone. Count with recover="never", or from a witness '
                "of the new gang on (WorkerPool.recoveries)"
            )
        ranks = tuple(now.since(then) for then, now in zip(before.ranks, self.ranks, strict=True))
        return replace(self, steps=self.steps - before.steps, ranks=ranks)
