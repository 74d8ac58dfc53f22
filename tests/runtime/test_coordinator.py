"""The coordinator when its pool is not there."""

import os
import subprocess
import sys

import pytest
from leafsum.runtime.coordinator import Coordinator
from leafsum.runtime.gang import HostGone
from leafsum.runtime.launcher import Joiner
from leafsum.runtime.messages import Started
from leafsum.runtime.run_folder import RunFolder


@pytest.fixture
def death_pipe():
    read_fd, write_fd = os.pipe()
    yield read_fd, write_fd
    for fd in (read_fd, write_fd):
        try:
            os.close(fd)
        except OSError:
            continue


def test_a_word_to_a_pool_that_is_gone_does_not_block(tmp_path, monkeypatch, death_pipe):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    coordinator = Coordinator(RunFolder(tmp_path, "run"), death_pipe[0], Joiner())
    with pytest.raises(HostGone):
        coordinator._tell_pool(Started())
    coordinator.context.destroy(linger=0)


def test_a_coordinator_whose_pool_dies_before_its_first_word_removes_the_run_folder(tmp_path, death_pipe):
    folder = tmp_path / "leafsum-run"
    folder.mkdir()
    read_fd, write_fd = death_pipe
    os.close(write_fd)
    command = [sys.executable, "-m", "leafsum.runtime.coordinator", "--run-folder", str(folder), "--run-id", "run"]
    done = subprocess.run([*command, "--death-fd", str(read_fd)], pass_fds=[read_fd], timeout=60, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert not folder.exists()


def test_a_coordinator_whose_run_folder_is_gone_leaves_without_a_word(tmp_path, death_pipe):
    command = [sys.executable, "-m", "leafsum.runtime.coordinator", "--run-id", "run"]
    command += ["--run-folder", str(tmp_path / "gone"), "--death-fd", str(death_pipe[0])]
    done = subprocess.run(command, pass_fds=[death_pipe[0]], timeout=60, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_folder_that_takes_no_socket_is_one_sentence_that_names_tmpdir(tmp_path, death_pipe):
    (tmp_path / "host.sock").mkdir()
    command = [sys.executable, "-m", "leafsum.runtime.coordinator", "--run-id", "run"]
    command += ["--run-folder", str(tmp_path), "--death-fd", str(death_pipe[0])]
    done = subprocess.run(command, pass_fds=[death_pipe[0]], timeout=60, capture_output=True, text=True)
    assert done.returncode == 1
    text = f"leafsum: the coordinator cannot start: cannot make the control socket {tmp_path}/host.sock: "
    (line,) = done.stderr.splitlines()
    assert line.startswith(text)
    assert line.endswith("or set TMPDIR to another folder")
