"""Run folders are private, and one whose run was killed whole does not stay."""

import os
import stat
import subprocess
import sys

import pytest
from leafsum.errors import ConfigError
from leafsum.runtime import run_folder
from leafsum.runtime.run_folder import RunFolder


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def test_a_folder_is_private_and_goes(base):
    folder = RunFolder.make()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert folder.path.parent == base
    folder.remove()
    folder.remove()
    assert list(base.iterdir()) == []


def test_a_folder_that_nobody_holds_is_removed_by_the_next_run(base):
    program = "import os; from leafsum.runtime.run_folder import RunFolder as R; f = R.make(); os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(base)}, check=False)
    assert killed.returncode == -9
    (abandoned,) = base.iterdir()
    held = RunFolder.make()
    assert not abandoned.exists()
    other = RunFolder.make()
    assert held.path.exists()
    for folder in (held, other):
        folder.remove()


def test_an_interrupt_right_after_the_folder_was_made_leaves_nothing(base, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "hold", interrupted)
    with pytest.raises(KeyboardInterrupt):
        RunFolder.make()
    assert list(base.iterdir()) == []


def test_what_is_being_made_and_what_is_no_run_folder_stay(base):
    (base / "leafsum-beingmade").mkdir()
    (base / "leafsum-file").write_text("")
    (base / "other").mkdir()
    RunFolder.make().remove()
    assert sorted(path.name for path in base.iterdir()) == ["leafsum-beingmade", "leafsum-file", "other"]


def test_a_base_that_does_not_exist_names_tmpdir(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder.tempfile, "gettempdir", lambda: str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="TMPDIR"):
        RunFolder.make()
