"""Another user of the machine reaches nothing of a run; the user himself sees it with `leafsum doctor`."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from leafsum.runtime import run_folder
from leafsum.runtime.live_runs import live_runs
from leafsum.runtime.pool import WorkerPool
from leafsum.runtime.sampling import SamplingParams
from processes import wait_until

NOBODY = 65534

ATTEMPTS = f"""
import errno, json, os, socket, sys

os.setgroups([])
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})

def connect(path):
    with socket.socket(socket.AF_UNIX) as own:
        own.connect(path)

def outcome(attempt, path):
    try:
        attempt(path)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"

kinds = {{"list": os.listdir, "open": lambda path: os.close(os.open(path, os.O_RDONLY)), "connect": connect}}
print(json.dumps([outcome(kinds[kind], path) for kind, path in json.load(sys.stdin)]))
"""


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    """A folder like /tmp: everybody may make files in it. pytest's own are inside one that only its user enters."""
    base = Path(tempfile.mkdtemp(prefix="everybody-", dir="/tmp"))
    base.chmod(0o1777)
    yield base
    shutil.rmtree(base)


@pytest.fixture(scope="module")
def pool(base) -> Iterator[WorkerPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder.tempfile, "gettempdir", lambda: str(base))
        with WorkerPool(model="tiny", tp=2, threads=1) as pool:
            pool.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
            yield pool


def sockets_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if stat.S_ISSOCK(path.lstat().st_mode)]


def test_only_its_user_enters_the_run_folder(pool):
    folder = pool.run_folder.lstat()
    assert stat.S_ISDIR(folder.st_mode)
    assert (stat.S_IMODE(folder.st_mode), folder.st_uid) == (0o700, os.getuid())
    assert len(sockets_in(pool.run_folder)) == 2, "of the pool, and of the ranks"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_can_connect_to_nothing_and_read_nothing(pool, base):
    """An open socket beside the run folder shows that the attempts are real."""
    pids = [pool.coordinator_pid, *(rank.pid for rank in pool.witness().ranks)]
    attempts = [("list", pool.run_folder)]
    attempts += [("connect", path) for path in sockets_in(pool.run_folder)]
    attempts += [("open", path) for path in pool.run_folder.iterdir()]
    attempts += [("list", Path(f"/proc/{pid}/fd")) for pid in pids]  # the ranks' shared memory has no other name
    with socket.socket(socket.AF_UNIX) as for_all:
        for_all.bind(str(base / "for-all.sock"))
        (base / "for-all.sock").chmod(0o777)
        for_all.listen()
        told = attempted([*attempts, ("connect", base / "for-all.sock"), ("list", base)])
    assert told == ["EACCES"] * len(attempts) + ["done", "done"]
    assert len(pool.generate([[1, 2, 3]], SamplingParams(max_tokens=1))) == 1


def attempted(attempts: list[tuple[str, Path]]) -> list[str]:
    """What comes of each when user 65534 makes it: "done", or the name of the error."""
    asked = json.dumps([(kind, str(path)) for kind, path in attempts])
    command = [sys.executable, "-c", ATTEMPTS]
    told = subprocess.run(command, input=asked, capture_output=True, text=True, check=True, timeout=60)
    outcomes: list[str] = json.loads(told.stdout)
    return outcomes


def test_a_real_run_is_found_alive(pool):
    ranks = pool.witness().ranks

    def found():
        return next((run for run in live_runs() if run.program_pid == os.getpid() and run.tp == 2), None)

    wait_until(lambda: (run := found()) is not None and not run.missing, "the run is found")
    run = found()
    assert run is not None
    assert run.coordinator is not None
    assert run.coordinator.pid == pool.coordinator_pid
    assert [rank.pid for rank in run.ranks] == [rank.pid for rank in ranks]
    assert pool.run_folder.name.endswith(run.run_id)
