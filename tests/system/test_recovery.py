"""Ranks are killed at random moments under open streams: every stream goes on with the bytes it would have had."""

from __future__ import annotations

import random
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from broken_coordinator import break_ranks
from broken_worker import DEADLY
from leafsum.errors import ModelError
from leafsum.ranks.tiny import ensure_tiny
from leafsum.runtime.pool import WorkerPool
from leafsum.runtime.recoveries import Recovery
from leafsum.runtime.sampling import Completion, SamplingParams
from processes import all_gone, kill, rank_pids, wait_until

NUM_STREAMS = 8
PROMPTS = [[(7 * stream + position) % 250 for position in range(3 + 9 * stream)] for stream in range(NUM_STREAMS)]
WAIT_S = 300.0


def start(**fields: object) -> WorkerPool:
    settings = {"threads": 1, "tp": 3, "kv_tokens": 8192, "prefill_chunk": 24, "digests": True, "layer_digests": True}
    return WorkerPool(model="tiny", **{**settings, "recover_limit": 1000, **fields})


def sampling(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)


def bits_of(completions: Sequence[Completion]) -> list[tuple[object, ...]]:
    return [
        (each.finish_reason, each.token_ids, each.residual_hash, each.logits_sha256, each.layer_hashes, each.text)
        for each in completions
    ]


class Streams:
    """Eight streams, each read by a thread of its own; all that they were told, in order."""

    def __init__(self, pool: WorkerPool, num_tokens: int) -> None:
        self.told: list[list[int]] = [[] for _ in PROMPTS]
        self.texts = ["" for _ in PROMPTS]
        self._completions: dict[int, Completion] = {}
        self._errors: list[Exception] = []
        self._threads = [
            threading.Thread(target=self._read, args=(pool, index, num_tokens), daemon=True)
            for index in range(NUM_STREAMS)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, pool: WorkerPool, index: int, num_tokens: int) -> None:
        try:
            with pool.stream(PROMPTS[index], sampling(num_tokens)) as stream:
                for delta in stream:
                    self.told[index] += delta.token_ids
                    self.texts[index] += delta.text or ""
            (self._completions[index],) = stream.result()
        except Exception as error:
            self._errors.append(error)

    @property
    def num_told(self) -> int:
        return sum(map(len, self.told))

    @property
    def go_on(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def result(self) -> list[Completion]:
        for thread in self._threads:
            thread.join(WAIT_S)
        assert not self._errors, self._errors
        completions = [self._completions[index] for index in range(NUM_STREAMS)]
        assert [tuple(told) for told in self.told] == [each.token_ids for each in completions], "nothing lost or twice"
        assert self.texts == [each.text for each in completions]
        return completions


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[Callable[[int], list[tuple[object, ...]]]]:
    """What the streams come to on one rank, alone, by the number of their tokens."""
    with start(tp=1, concurrency=1, recover="never") as pool:
        yield lambda num_tokens: bits_of(pool.generate(PROMPTS, sampling(num_tokens)))


def came_up(pool: WorkerPool) -> list[Recovery]:
    return [recovery for recovery in pool.recoveries if recovery.num_ranks]


def kill_one(run_id: str, chance: random.Random) -> int:
    """Kill a random rank of the gang that is there, ready or not; its pid."""
    while not (pids := rank_pids(run_id)):
        time.sleep(0.01)
    victim = chance.choice(sorted(pids))
    kill(victim)
    return victim


@pytest.mark.parametrize(
    ("num_kills", "num_tokens"),
    [(3, 40), pytest.param(50, 240, marks=[pytest.mark.full, pytest.mark.timeout(1500)])],
    ids=["few", "fifty"],
)
def test_streams_go_on_with_the_same_bytes_however_often_ranks_are_killed(undisturbed, num_kills, num_tokens):
    """The first kill comes after a first token; the others at any moment: also while a gang starts, or catches up."""
    chance = random.Random(num_kills)
    with start() as pool:
        first_pids = {rank.pid for rank in pool.witness().ranks}
        streams = Streams(pool, num_tokens)
        wait_until(lambda: streams.num_told, "a first token")
        killed = set()
        for number in range(num_kills):
            num_before = len(came_up(pool))
            assert streams.go_on, f"the streams had ended at kill {number}: too few tokens for so many"
            killed.add(kill_one(pool.run_id, chance))
            if chance.random() < 0.7:  # let the next gang come up first; else it is hit while it starts
                wait_until(lambda: len(came_up(pool)) > num_before, "a new gang", WAIT_S)  # noqa: B023
            time.sleep(chance.random() * 0.15)
        completions = streams.result()
        recoveries = came_up(pool)
        last_pids = {rank.pid for rank in pool.witness().ranks}
    assert len(killed) == num_kills, "every one was another process"
    assert all_gone(first_pids | killed)
    assert last_pids == set(recoveries[-1].pids)
    assert not last_pids & (first_pids | killed)
    num_lived_through = max(each.recoveries for each in completions)
    assert num_kills * 0.5 <= num_lived_through <= len(recoveries) <= num_kills
    assert bits_of(completions) == undisturbed(num_tokens)


def test_a_gang_that_cannot_be_had_again_shrinks_and_the_streams_go_on_with_the_same_bytes(undisturbed):
    """Somebody kills every rank of a gang of three, until there is one of two, and later every one of two."""
    num_tokens = 60
    with start(recover="shrink") as pool:
        streams = Streams(pool, num_tokens)
        for num_ranks in (3, 2):
            told = streams.num_told
            wait_until(lambda: streams.num_told > told, "streams go on", WAIT_S)  # noqa: B023
            wait_until(lambda: kill_all_of(pool.run_id, num_ranks), f"fewer than {num_ranks}", WAIT_S)  # noqa: B023
        completions = streams.result()
        assert [each.num_ranks for each in came_up(pool)] == [2, 1]
    assert {each.tp for each in completions} == {1}
    assert bits_of(completions) == undisturbed(num_tokens)


def kill_all_of(run_id: str, num_ranks: int) -> bool:
    """Kill what there is of gangs of as many; True once there is a smaller one."""
    pids = rank_pids(run_id)
    for pid, tp in pids.items():
        if tp >= num_ranks:
            kill(pid)
    return any(tp < num_ranks for tp in pids.values())


@pytest.mark.parametrize("num_deadly", [1, pytest.param(2, marks=pytest.mark.full)])
def test_requests_that_crash_ranks_are_given_up_and_the_others_come_to_the_same_bytes(
    num_deadly, undisturbed, monkeypatch
):
    """Each crashes one gang in company and one alone, no third; those starts count no more once it is found."""
    num_tokens = 12
    break_ranks(monkeypatch, "dies of a token")
    deadly = [[5, 6, DEADLY, 7], [DEADLY]][:num_deadly]
    with start(tp=2, recover_limit=2) as pool:
        found = pool.generate([*PROMPTS, *deadly], sampling(num_tokens))
        assert num_deadly + 1 <= len(came_up(pool)) <= 2 * num_deadly, "several may have part in the first"
        assert all("signal SIGSEGV" in recovery.cause for recovery in pool.recoveries)
    others, given_up = found[:NUM_STREAMS], found[NUM_STREAMS:]
    assert [(each.finish_reason, each.token_ids) for each in given_up] == [("failed", ())] * num_deadly
    assert all("twice with the same rows; it is given up: rank 1 of 2" in each.error for each in given_up)
    assert bits_of(others) == undisturbed(num_tokens)


def test_a_new_gang_never_goes_on_with_other_weights(tmp_path):
    """The same names, shapes and sizes with other bytes, and nothing told that could differ: it is refused all the
    same, by the files themselves.
    """
    model = Path(shutil.copytree(ensure_tiny(), tmp_path / "model"))
    with WorkerPool(model=str(model), tp=2, threads=1, kv_tokens=512) as pool:
        pool.generate([[1, 2]], sampling(2))
        weights = model / "model.safetensors"
        other = tmp_path / "other"
        other.write_bytes(weights.read_bytes()[:-4] + bytes(4))
        other.replace(weights)
        kill_one(pool.run_id, random.Random(1))
        with pytest.raises(ModelError, match=r"a file of .*model was replaced or written since the pool was started"):
            pool.generate([[1, 2]], sampling(2))


def test_a_run_folder_that_somebody_has_removed_is_made_again():
    with start(tp=2) as pool:
        (expected,) = pool.generate([PROMPTS[0]], sampling(6))
        shutil.rmtree(pool.run_folder)
        kill_one(pool.run_id, random.Random(1))
        (found,) = pool.generate([PROMPTS[0]], sampling(6))
        assert len(came_up(pool)) == 1
        folder = pool.run_folder
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert bits_of([found]) == bits_of([expected])
    assert not folder.exists()


@pytest.mark.full
def test_recovery_over_gloo(undisturbed):
    num_tokens = 30
    with start(transport="gloo", tp=2) as pool:
        streams = Streams(pool, num_tokens)
        wait_until(lambda: streams.num_told, "a first token")
        kill_one(pool.run_id, random.Random(1))
        completions = streams.result()
        assert len(came_up(pool)) == 1
    assert bits_of(completions) == undisturbed(num_tokens)
