"""Every row of the fault table in docs/reliability.md, read from the page and brought about in real processes."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fault_table
import faulty
import faulty_program
import pytest
from fault_table import Case
from faulty import has_happened, order
from house.checkout import ROOT
from leafsum.errors import LeafsumError, PoolClosed
from leafsum.runtime import conversation, line
from leafsum.runtime.commands import main as command_frame
from leafsum.runtime.pool import WorkerPool
from leafsum.runtime.sampling import Completion, SamplingParams
from processes import all_gone, processes_in, wait_until

PAGE = ROOT / "docs" / "reliability.md"
CASES = fault_table.read_cases(PAGE)

TP = 2
PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8]]
SAMPLING = SamplingParams(max_tokens=12, ignore_eos=True)
HANGS = ("SIGSTOP", "deadline", "deadline with the GIL")
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
BEFORE_STARTED = ("spawn", "load", "ready")

SHORT_S = 5.0
"""A step's deadline, or the first word's, where the fault is that nothing comes: a hundred times what it takes."""

LOAD_S = 20.0
"""The same of a model that is loaded: four times what a start takes on two cores that others use too."""

PATIENCE_S = 2.0
"""In place of the 30 s and 20 s for which a pool waits longer than its coordinator."""


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """A pool that waits for a silent coordinator as long as a test may. It has no time left for ranks that hang."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversation, "GRACE_S", PATIENCE_S)
        patch.setattr(line, "CLOSE_TIMEOUT_S", PATIENCE_S)
        yield


MARGIN_S = 90.0
"""On top of the deadlines that the page names: the rest of the work, on a slow machine."""


class Ground:
    """Folders of one pool: where it runs and has its run folder, and where its faults are ordered."""

    def __init__(self, folder: Path) -> None:
        self.home, self.faults = folder / "home", folder / "faults"
        self.home.mkdir()
        self.faults.mkdir()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.home)
            patch.setattr(tempfile, "tempdir", str(self.home))
            patch.setenv(faulty.VARIABLE, str(self.faults))
            patch.setenv("PYTHONPATH", faulty.search_path())
            patch.setattr(conversation, "Child", faulty_program.faulty_coordinator)
            yield

    def start(self, **fields: Any) -> WorkerPool:
        return WorkerPool(model="tiny", threads=1, kv_tokens=1024, **{"tp": TP, **fields})

    def require_nothing_left(self) -> None:
        wait_until(lambda: not processes_in(self.home), "no process left")
        assert list(self.home.iterdir()) == [], "the run folder"
        assert [name for name in os.listdir("/dev/shm") if "leafsum" in name] == []
        assert [name for name in open_files() if "memfd:leafsum" in name] == []


def open_files() -> list[str]:
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(os.readlink(entry))
    return links


@pytest.fixture
def ground(tmp_path_factory) -> Iterator[Ground]:
    ground = Ground(tmp_path_factory.mktemp("g"))
    with ground.entered():
        yield ground
    ground.require_nothing_left()


class Served:
    """A pool whose gangs recover: one fault after the other meets it, and each gets the gang that the last one left."""

    def __init__(self, ground: Ground, **fields: Any) -> None:
        self.ground = ground
        with ground.entered():
            self.pool = ground.start(recover_limit=10_000, digests=True, **fields)
        self.undisturbed = self.pool.generate(PROMPTS, SAMPLING)

    def pids(self) -> dict[str, int]:
        return pids_of(self.pool)


@pytest.fixture(scope="module")
def serve(tmp_path_factory) -> Iterator[Any]:
    """Gives the pool with these deadlines; one that a failed test has left closed is replaced."""
    pools: dict[tuple[Any, ...], Served] = {}

    def get(**fields: Any) -> Served:
        key = tuple(fields.items())
        if key not in pools or not is_open(pools[key].pool):
            pools[key] = Served(Ground(tmp_path_factory.mktemp("g")), **fields)
        return pools[key]

    yield get
    for served in pools.values():
        served.pool.close()
        served.ground.require_nothing_left()


def is_open(pool: WorkerPool) -> bool:
    try:
        return pool.coordinator_pid > 0
    except PoolClosed:
        return False


def pids_of(pool: WorkerPool) -> dict[str, int]:
    return {"coordinator": pool.coordinator_pid} | {f"rank {each.rank}": each.pid for each in pool.witness().ranks}


def victim_of(case: Case) -> str:
    return f"rank {TP - 1}" if case.victim == "last rank" else case.victim


def num_ranks_of(case: Case) -> int:
    """One where the coordinator is the victim: whatever it does, ranks end alike."""
    return 1 if case.victim == "coordinator" else TP


def rank_of(case: Case) -> int:
    return {"coordinator": -1, "rank 0": 0, "last rank": TP - 1}[case.victim]


def deadlines_of(case: Case) -> dict[str, Any]:
    """Short ones where the fault is that nothing comes; else the defaults."""
    if case.fault not in HANGS:
        return {}
    start_s = SHORT_S if case.phase == "spawn" else LOAD_S
    if case.victim == "coordinator" and case.phase == "load":
        start_s = SHORT_S  # its own: it hangs, and cannot say that ranks are late
    return {"step_timeout_s": SHORT_S, "start_timeout_s": start_s}


def place(case: Case, folder: Path) -> None:
    """Order the fault, and what leads to its phase."""
    if case.phase == "recovery":
        order(folder, "rank 0", "decode", "SIGKILL")
    if case.phase == "idle" and case.fault in SIGNALS:
        return
    order(folder, victim_of(case), case.phase, case.fault)


def meet_idle(case: Case, pool: WorkerPool, folder: Path) -> None:
    """Bring the fault about while no request is open."""
    if case.phase != "idle":
        return
    pid = pids_of(pool)[victim_of(case)]
    os.kill(pid, SIGNALS.get(case.fault, signal.SIGUSR1))
    wait_until(lambda: happened(case, folder), "the fault")


def happened(case: Case, folder: Path) -> bool:
    return has_happened(folder, victim_of(case), case.phase)


def test_the_table_has_every_combination_once_or_says_why_not():
    found = collections.Counter(case.combination for case in CASES)
    found.update(fault_table.read_senseless(PAGE))
    every = set(itertools.product(fault_table.VICTIMS, fault_table.PHASES, fault_table.FAULTS))
    assert every - set(found) == set(), "combinations that the page leaves out"
    assert [combination for combination, count in found.items() if count > 1] == [], "named twice"


def test_the_telling_cases_meet_every_victim_phase_fault_and_outcome():
    telling = [case for case in CASES if case.is_telling]
    assert {case.victim for case in telling} == set(fault_table.VICTIMS)
    assert {case.phase for case in telling} == set(fault_table.PHASES)
    assert {case.fault for case in telling} >= set(fault_table.FAULTS)
    assert {(case.outcome, case.exit_code) for case in telling} == {(case.outcome, case.exit_code) for case in CASES}


def name_of(case: Case) -> str:
    return f"{case.victim}, {case.phase}, {case.fault}"


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name_of(case), marks=() if case.is_telling else pytest.mark.full) for case in CASES],
)
def test_row(case: Case, request: pytest.FixtureRequest) -> None:
    begin_s = time.monotonic()
    with impatient() if case.victim == "coordinator" and case.fault in HANGS else contextlib.nullcontext():
        bring_about(case, request)
    assert time.monotonic() - begin_s < sum(deadlines_of(case).values()) + MARGIN_S


def bring_about(case: Case, request: pytest.FixtureRequest) -> None:
    if case.outcome == "recovers":
        recover(case, request.getfixturevalue("serve"))
    elif case.outcome == "closes":
        close(case, request.getfixturevalue("ground"))
    elif case.fault == "disk full":
        disk_full(case, request.getfixturevalue("ground"))
    else:
        fail(case, request.getfixturevalue("ground"))


def recover(case: Case, serve: Any) -> None:
    served = serve(**deadlines_of(case))
    pool, folder, pids = served.pool, served.ground.faults, served.pids()
    num_before = pool.recoveries[-1].number if pool.recoveries else 0
    place(case, folder)
    meet_idle(case, pool, folder)
    if case.phase == "idle" and case.fault not in HANGS:
        wait_until(lambda: pool.recoveries and pool.recoveries[-1].number > num_before, "the loss to be told")
    completions = pool.generate(PROMPTS, SAMPLING)
    assert happened(case, folder)
    require_equal(completions, served.undisturbed)
    new = [recovery for recovery in pool.recoveries if recovery.number > num_before]
    assert len(new) == 1 + (case.phase == "recovery") or case.fault in HANGS  # there, a slow start is lost as well
    event = new[case.phase == "recovery"]
    assert case.is_told_in(event.cause, rank_of(case)), event.cause
    assert new[-1].num_ranks == TP
    assert served.pids() == {
        "coordinator": pids["coordinator"],
        **{f"rank {rank}": pid for rank, pid in enumerate(new[-1].pids)},
    }
    old_pids = [pid for name, pid in pids.items() if name != "coordinator"]
    assert all_gone(old_pids)
    assert not set(old_pids) & set(new[-1].pids)
    assert case.exit_code == 0


def require_equal(completions: list[Completion], undisturbed: list[Completion]) -> None:
    for found, expected in zip(completions, undisturbed, strict=True):
        for name in ("token_ids", "token_sha256", "residual_hash", "logits_sha256", "text", "finish_reason"):
            assert getattr(found, name) == getattr(expected, name), name


def fail(case: Case, ground: Ground) -> None:
    fields = {"tp": num_ranks_of(case), **deadlines_of(case)}
    if case.phase in BEFORE_STARTED:
        place(case, ground.faults)
        with pytest.raises(LeafsumError) as caught:
            ground.start(**fields).close()
    else:
        if case.fault == "unreadable weights":
            order(ground.faults, victim_of(case), "weights", "a copy of its own")
        with ground.start(**fields) as pool:
            place(case, ground.faults)
            meet_idle(case, pool, ground.faults)
            with pytest.raises(LeafsumError) as caught:
                pool.generate(PROMPTS, SAMPLING)
            assert not is_open(pool)
    assert happened(case, ground.faults)
    assert type(caught.value).__name__ == case.outcome, caught.value
    assert case.is_told_in(str(caught.value), rank_of(case)), caught.value
    assert command_frame._tell(caught.value, debug=False) == case.exit_code


def close(case: Case, ground: Ground) -> None:
    pool = ground.start(tp=num_ranks_of(case))
    pids = pids_of(pool)
    place(case, ground.faults)
    pool.close()
    assert happened(case, ground.faults)
    assert case.exit_code == 0
    wait_until(lambda: all_gone(pids.values()), "no process left")  # ranks of a killed coordinator end by themselves


# A disk that is full, in a real program


SMALL_DISK = ["unshare", "-Urm", "sh", "-c"]
MOUNT = 'mount -t tmpfs -o size=256k,nr_inodes=32 leafsum "$TMPDIR"'
"""A disk of 256 KiB, which nobody else sees and which goes with the program."""


def disk_full(case: Case, ground: Ground) -> None:
    place(case, ground.faults)
    program = [sys.executable, "-m", "faulty_program", "--debug", "generate", "--model", "tiny", "--tp", str(TP)]
    program += ["--threads", "1", "--prompt-ids", "1,2,3,4,5", "--max-tokens", "12", "--ignore-eos"]
    program += ["--recover-limit", "1"]
    environ = {**os.environ, "TMPDIR": str(ground.home)}
    script = '"$@"; code=$?; ls -A "$TMPDIR"; exit $code'
    if can_mount(environ):
        command = [*SMALL_DISK, f"{MOUNT} && {script}", "sh", *program]
    else:
        command = ["sh", "-c", script, "sh", *program]
        environ["DISK"] = faulty.PRETENDED
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=MARGIN_S)
    assert happened(case, ground.faults), done.stderr
    assert done.returncode == case.exit_code, done.stderr
    assert f"errors.{case.outcome}: " in done.stderr
    assert case.is_told_in(done.stderr, rank_of(case)), done.stderr
    assert done.stdout == "", "no text, and nothing left in the folder"


def can_mount(environ: dict[str, str]) -> bool:
    try:
        return subprocess.run([*SMALL_DISK, MOUNT], env=environ, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False
