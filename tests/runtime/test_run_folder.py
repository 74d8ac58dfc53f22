"""Run folders are private, and one whose run was killed whole does not stay."""

import os
import stat
import subprocess
import sys
from pathlib import Path

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


def run_folder_in(place: Path, name: str = "leafsum-left") -> Path:
    """What a run left that was killed whole."""
    folder = place / name
    folder.mkdir(mode=0o700)
    run_folder.lock_of(folder).touch()
    return folder


def test_a_link_to_a_run_folder_is_not_followed(base, tmp_path_factory):
    target = run_folder_in(tmp_path_factory.mktemp("elsewhere"))
    (base / "leafsum-link").symlink_to(target)
    (base / "leafsum-dangling").symlink_to(base / "nothing")
    assert run_folder.abandoned_in(base) == []
    RunFolder.make().remove()
    assert run_folder.lock_of(target).exists()
    assert sorted(path.name for path in base.iterdir()) == ["leafsum-dangling", "leafsum-link"]


def test_a_lock_file_that_is_a_link_is_not_followed(base):
    folder = base / "leafsum-left"
    folder.mkdir()
    run_folder.lock_of(folder).symlink_to(base / "elsewhere")
    RunFolder.make().remove()
    assert [path.name for path in base.iterdir()] == ["leafsum-left"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's folder")
def test_another_users_run_folder_stays(base):
    os.chown(run_folder_in(base), 65534, 65534)
    assert run_folder.abandoned_in(base) == []
    RunFolder.make().remove()
    assert [path.name for path in base.iterdir()] == ["leafsum-left"]


def test_abandoned_folders_are_told_and_left_to_the_next_run(base):
    left = run_folder_in(base)
    held = RunFolder.make(sweeps=False)
    assert run_folder.abandoned_in(base) == [left]
    RunFolder.make().remove()
    assert [path for path in base.iterdir() if path != held.path] == []
    held.remove()


def test_a_name_that_is_taken_is_never_used(base, monkeypatch):
    (base / "leafsum-file").touch()
    (base / "leafsum-link").symlink_to(base)
    (base / "leafsum-folder").mkdir()
    ids = iter(["link", "folder", "file", "free"])
    monkeypatch.setattr(run_folder.secrets, "token_hex", lambda _: next(ids))
    folder = RunFolder.make()
    assert folder.run_id == "free"
    folder.remove()
    assert sorted(path.name for path in base.iterdir()) == ["leafsum-file", "leafsum-folder", "leafsum-link"]


@pytest.mark.parametrize(("mode", "is_safe"), [(0o700, True), (0o755, True), (0o1777, True), (0o777, False)])
def test_a_base_where_everybody_can_rename_a_run_folder_is_refused(base, mode, is_safe):
    base.chmod(mode)
    if is_safe:
        RunFolder.make().remove()
    else:
        with pytest.raises(ConfigError, match="no sticky bit"):
            RunFolder.make()
    assert list(base.iterdir()) == []


def test_the_paths_of_every_gang_are_of_one_length(base):
    """Else a run would start, and could not be started again after its tenth gang."""
    folder = RunFolder(base, "0123456789ab")
    assert len({len(str(folder.ranks_socket(number))) for number in (0, 9, 10, 99_999)}) == 1


def test_a_folder_that_was_removed_is_made_again_and_held(base):
    folder = RunFolder.make()
    run_folder.shutil.rmtree(folder.path)
    folder.restore()
    folder.restore()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    run_folder.remove_abandoned(base)
    assert folder.path.exists()
    folder.remove()


@pytest.mark.usefixtures("base")
def test_a_folder_that_another_user_has_made_in_its_place_is_refused(monkeypatch):
    folder = RunFolder.make()
    monkeypatch.setattr(run_folder.os, "getuid", lambda: 12345)
    with pytest.raises(ConfigError, match="another user's"):
        folder.restore()
