"""The doctor: each check answers by itself, and says what to do."""

import json
import platform
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from leafsum.runtime import live_runs, run_folder
from leafsum.runtime.commands import checks
from leafsum.runtime.commands.main import run


@pytest.fixture(autouse=True)
def no_runs(monkeypatch):
    """Neither those of other tests, which go on at the same time, nor what they have left."""
    monkeypatch.setattr(live_runs, "live_runs", list)
    monkeypatch.setattr(run_folder, "abandoned_in", lambda _: [])


def by_name(checks):
    return {check.name: check for check in checks}


def test_this_machine_has_every_check_and_advice_where_something_is_wrong():
    found = by_name(checks.examine({}))
    assert set(found) == {
        "python",
        "packages",
        "extension",
        "processor",
        "memory",
        "kernel",
        "pidfd",
        "shared memory",
        "run folder",
        "variables",
        "gpus",
    }
    assert all(check.advice for check in found.values() if check.status != "ok")
    assert "torch" in found["packages"].found


def test_old_kernels_fail(monkeypatch):
    for release, status in [("5.3.18-generic", "fail"), ("5.4.0", "ok"), ("4.20.1", "fail"), ("10.0", "ok")]:
        monkeypatch.setattr(platform, "release", lambda release=release: release)
        assert by_name(checks.examine({}))["kernel"].status == status


def test_an_unknown_variable_fails_with_the_nearest_name():
    check = by_name(checks.examine({"LEAFSUM_KV_TOKEN": "1"}))["variables"]
    assert check.status == "fail"
    assert "did you mean LEAFSUM_KV_TOKENS?" in check.found


def test_a_long_temporary_folder_fails(monkeypatch, tmp_path):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(folder))
    check = by_name(checks.examine({}))["run folder"]
    assert (check.status, check.advice) == ("fail", "set TMPDIR to a shorter folder")
    assert list(folder.iterdir()) == []


def test_a_check_that_breaks_is_a_failed_check(monkeypatch):
    monkeypatch.setattr(checks, "cpu_name", lambda: 1 // 0)
    check = by_name(checks.examine({}))["processor"]
    assert check.status == "fail"
    assert "ZeroDivisionError" in check.found


@pytest.mark.parametrize(("status", "exit_code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_exit_code_is_1_where_a_check_fails(status, exit_code, monkeypatch, capfd):
    made = [checks.Check("python", "ok", "3"), checks.Check("kernel", status, "1.0", "newer")]
    monkeypatch.setattr(checks, "examine", lambda: made)
    assert run(["doctor", "--json"]) == exit_code
    found = json.loads(capfd.readouterr().out)
    assert found["ok"] is (exit_code == 0)
    assert found["checks"][1] == {"name": "kernel", "status": status, "found": "1.0", "advice": "newer"}
    assert run(["doctor"]) == exit_code
    assert capfd.readouterr().out.splitlines() == ["ok    python  3", f"{status:4}  kernel  1.0 -> newer"]


def process(role, pid, state="S"):
    return live_runs.LiveProcess(role, pid, state, age_s=12.0, cpu_s=1.5, memory_bytes=3 << 20)


RUN = live_runs.LiveRun("ab12", 7, process("coordinator", 8), (process("rank 0", 9), process("rank 1", 10)), tp=2)
STOPPED = replace(RUN, ranks=(process("rank 0", 9, "T"), process("rank 1", 10)))
HALF = replace(RUN, ranks=(process("rank 1", 10),))
ORPHANED = replace(RUN, program_pid=0, coordinator=None)
STARTING = replace(RUN, ranks=(), tp=0)
ABANDONED = Path("somewhere/leafsum-ab13")


@pytest.mark.parametrize(
    ("run_found", "status", "words"),
    [
        (RUN, "ok", "program pid 7; coordinator pid 8 S 1.5 s 3 MiB; rank 0 pid 9 S 1.5 s 3 MiB; rank 1 pid 10"),
        (STOPPED, "warn", "rank 0 pid 9 T stopped 1.5 s"),
        (HALF, "warn", "rank 0 missing"),
        (ORPHANED, "warn", "coordinator missing"),
        (STARTING, "warn", "every rank missing"),
    ],
)
def test_a_live_run_is_a_line_and_one_to_look_at_stands_out(run_found, status, words, monkeypatch, capfd):
    monkeypatch.setattr(live_runs, "live_runs", lambda: [run_found])
    monkeypatch.setattr(run_folder, "abandoned_in", lambda _: [ABANDONED])
    monkeypatch.setattr(checks, "examine", lambda: [checks.Check("python", "ok", "3")])
    assert run(["doctor"]) == 0
    _, line, abandoned = capfd.readouterr().out.splitlines()
    assert line.startswith(f"{status:4}  run        ab12 tp {run_found.tp}, 12 s old")
    assert words in line
    assert ("end with kill -9" in line) is (status == "warn")
    assert abandoned == f"ok    abandoned  {ABANDONED} -> the next start removes it"
    assert run(["doctor", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["abandoned_run_folders"] == [str(ABANDONED)]
    (told_run,) = told["runs"]
    assert told_run["run_id"] == "ab12"
    assert told_run["missing"] == list(run_found.missing)
    assert [rank["pid"] for rank in told_run["ranks"]] == [rank.pid for rank in run_found.ranks]


def test_doctor_removes_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    left = tmp_path / "leafsum-ab13"
    left.mkdir()
    run_folder.lock_of(left).touch()
    checks.examine({})
    assert left.exists()
