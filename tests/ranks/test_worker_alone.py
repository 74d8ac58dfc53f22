"""A rank that is nobody's child, and one that cannot write to its standard error."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket as socket_module
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import zmq
from leafsum.ranks.control import open_socket, rank_identity
from leafsum.ranks.messages import FROM_RANK, Hello, decode, encode
from leafsum.runtime.run_folder import RunFolder
from processes import wait_until
from rank_process import WAIT_S, arguments_of
from setups import RUN_ID, make_setup
from tiny_checkpoints import write_checkpoint

WORKER = [sys.executable, "-P", "-m", "leafsum.ranks.worker"]


@pytest.fixture
def folder(tmp_path_factory) -> RunFolder:
    return RunFolder(tmp_path_factory.mktemp("run"), RUN_ID)


@pytest.fixture
def coordinator() -> Iterator[subprocess.Popen]:
    """Another process whose end the rank must see. It says nothing: its socket is the test's."""
    with ended_at_last(subprocess.Popen(["sleep", "600"])) as process:
        yield process


@pytest.fixture
def socket(folder) -> Iterator[zmq.Socket]:
    context: zmq.Context = zmq.Context()
    yield open_socket(context, zmq.ROUTER, folder.ranks_socket(0), bind=True)
    context.destroy(linger=0)


@contextlib.contextmanager
def ended_at_last(process: subprocess.Popen) -> Iterator[subprocess.Popen]:
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def hear_hello(socket: zmq.Socket) -> None:
    assert socket.poll(WAIT_S * 1000), "the rank is silent"
    assert isinstance(decode(socket.recv_multipart()[1], FROM_RANK), Hello)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_was_launched_elsewhere_ends_with_its_coordinator(folder, coordinator, socket, end):
    command = [*WORKER, *arguments_of(folder), "--coordinator-pid", str(coordinator.pid)]
    with ended_at_last(subprocess.Popen(command)) as rank:
        hear_hello(socket)
        coordinator.send_signal(end)
        assert rank.wait(WAIT_S) == 0


def test_a_launched_rank_that_waits_for_its_peers_ends_with_its_coordinator(
    folder, coordinator, socket, tmp_path_factory
):
    model_dir = write_checkpoint(tmp_path_factory.mktemp("model"))
    patience = {"tp": 2, "start_timeout_s": 3600.0, "step_timeout_s": 3600.0}
    command = [*WORKER, *arguments_of(folder), "--coordinator-pid", str(coordinator.pid)]
    with ended_at_last(subprocess.Popen(command)) as rank:
        hear_hello(socket)
        setup = make_setup(model_dir, folder.path, kv_tokens=64, **patience)
        socket.send_multipart([rank_identity(RUN_ID, 0), encode(setup)])
        wait_until(folder.store(0).exists, "the rank is at the meeting")
        coordinator.kill()
        assert rank.wait(WAIT_S) == 0


def test_a_coordinator_that_has_ended_already_is_seen(folder, coordinator):
    coordinator.kill()
    coordinator.wait()
    command = [*WORKER, *arguments_of(folder), "--coordinator-pid", str(coordinator.pid)]
    assert subprocess.run(command, timeout=WAIT_S, check=False).returncode == 1


def test_a_rank_that_could_not_see_its_coordinators_end_does_not_start(folder):
    done = subprocess.run([*WORKER, *arguments_of(folder)], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 2
    assert "expected --death-fd or --coordinator-pid" in done.stderr


def closed() -> None:
    os.close(2)


def of_a_full_disk() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)


def without_a_reader() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    os.dup2(write_fd, 2)


def that_is_not_read() -> None:
    """The pipe is full, and its reader goes on for as long as the rank does."""
    _, write_fd = os.pipe2(0)
    fcntl.fcntl(write_fd, fcntl.F_SETFL, os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write_fd, bytes(4096))
    fcntl.fcntl(write_fd, fcntl.F_SETFL, 0)
    os.dup2(write_fd, 2)


def of_a_socket_that_is_not_read() -> None:
    """As a service manager gives it."""
    end, other = socket_module.socketpair()
    end.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            end.send(bytes(4096))
    end.setblocking(True)
    os.dup2(end.fileno(), 2)
    for each in (end, other):
        each.detach()


def of_a_terminal_that_is_not_read() -> None:
    """As after Ctrl-S."""
    _, terminal_fd = os.openpty()
    os.set_blocking(terminal_fd, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(terminal_fd, b"x" * 256)
    os.set_blocking(terminal_fd, True)
    os.dup2(terminal_fd, 2)


NOT_MINDED = [
    closed,
    of_a_full_disk,
    without_a_reader,
    that_is_not_read,
    of_a_socket_that_is_not_read,
    of_a_terminal_that_is_not_read,
]


@pytest.mark.parametrize("standard_error", NOT_MINDED)
def test_a_rank_does_not_mind_a_standard_error(folder, coordinator, socket, standard_error: Callable[[], None]):
    """At level debug it has said two events before its Hello."""
    command = [*WORKER, *arguments_of(folder), "--coordinator-pid", str(coordinator.pid)]
    with ended_at_last(subprocess.Popen(command, preexec_fn=standard_error, close_fds=False)) as rank:
        hear_hello(socket)
        coordinator.kill()
        assert rank.wait(WAIT_S) == 0
