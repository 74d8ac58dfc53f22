"""The doctor: each check answers by itself, and says what to do."""

import json
import platform
import tempfile

import pytest
from leafsum.runtime.commands import checks
from leafsum.runtime.commands.main import run


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
