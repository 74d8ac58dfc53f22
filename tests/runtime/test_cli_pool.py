"""The command line over real processes and the demonstration model: results, refusals, and nothing left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from leafsum.runtime.commands.interrupts import ONE_PRESS_S
from processes import rank_pids

TINY = ("--model", "tiny", "--threads", "1")


@pytest.fixture
def environ(tmp_path_factory):
    """An environment in which the run folders of this test lie apart from everybody else's, at a path short enough for
    their sockets."""
    return {**os.environ, "TMPDIR": str(tmp_path_factory.mktemp("run"))}


@contextmanager
def started(environ, *arguments, code=""):
    """The command as a process, ended in any case; `code` is run in it first."""
    start = ("-c", f"{code}; from leafsum.runtime.commands.main import main; main()") if code else ("-m", "leafsum")
    words = [sys.executable, *start, *arguments]
    with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def finish(environ, *arguments):
    """Exit code, standard output and standard error; no run folder may be left."""
    with started(environ, *arguments) as process:
        out, err = process.communicate(timeout=240)
    assert list(Path(environ["TMPDIR"]).iterdir()) == []
    return process.returncode, out, err


def wait_for(what, timeout_s=60.0):
    """The first true value of `what()`."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := what()):
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.02)
    return found


def wait_until_ready(process):
    """Read the log of a command with --log-level info, up to the line that says so."""
    assert any("event=ready" in line for line in process.stderr)


def processes_of(run_id):
    """Command lines that hold the run id: before a process names its role (an argument), and after (in its title)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # gone meanwhile
        if run_id in words:
            found.append(words)
    return found


def test_one_and_two_ranks_print_the_same(environ):
    arguments = (
        "generate",
        *TINY,
        "--prompt",
        "Once upon",
        "--prompt-ids",
        "1,2",
        "--max-tokens",
        "6",
        "--json",
        "--digests",
    )
    lines = []
    for tp in ("1", "2"):
        exit_code, out, err = finish(environ, *arguments, "--tp", tp)
        assert (exit_code, err) == (0, "")
        lines.append([{**json.loads(line), "tp": None} for line in out.splitlines()])
    assert lines[0] == lines[1]
    assert [found["prompt"] for found in lines[0]] == ["Once upon", None]
    assert [found["output_tokens"] for found in lines[0]] == [6, 6]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--prompt-ids", "1,100000"), "expected a token id of 0 to"),
        (("--prompt", "x", "--tp", "65"), "got 65"),
        (("--prompt", "x" * 40000), "a prompt of 40,000 tokens"),
        (("--prompt", "x", "--max-context", "1000000"), "max_context: expected at most"),
    ],
)
def test_what_the_model_cannot_serve_is_refused(arguments, text, environ):
    exit_code, out, err = finish(environ, "generate", *TINY, *arguments)
    assert (exit_code, out) == (2, "")
    assert text in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("stage", "times"), [("starting", 1), ("starting", 2), ("loading", 1), ("loading", 2)]
)  # while generating is below, with text on its way
def test_ctrl_c_leaves_nothing_running(stage, times, environ):
    arguments = ("--tp", "2", "--prompt", "x", "--max-tokens", "4000", "--ignore-eos", "--log-level", "info")
    with started(environ, "generate", *TINY, *arguments) as process:
        (folder,) = wait_for(lambda: list(Path(environ["TMPDIR"]).glob("leafsum-*")))
        run_id = folder.name.removeprefix("leafsum-")
        if stage != "starting":
            wait_for(lambda: f"leafsum: rank 1/2 {run_id}" in " ".join(processes_of(run_id)))
        for _ in range(times):
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "leafsum: interrupted" in err.splitlines()
    assert "Traceback" not in err
    assert out == ""
    wait_for(lambda: not processes_of(run_id))
    assert not folder.exists()


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_the_second_ctrl_c_while_text_is_written_leaves_what_came(as_json, environ):
    arguments = ("--prompt", "x", "--max-tokens", "4000", "--ignore-eos", "--stream", *as_json)
    with started(environ, "generate", *TINY, *arguments) as process:
        begin = process.stdout.read(40)
        process.send_signal(signal.SIGINT)
        told = process.stderr.readline()
        time.sleep(2 * ONE_PRESS_S)
        process.send_signal(signal.SIGINT)
        rest, err = process.stdout.read(), process.stderr.read()
        process.wait(timeout=60)
    assert (process.returncode, err.strip()) == (130, "leafsum: interrupted")
    assert "Ctrl-C again ends at once" in told
    assert (begin + rest).endswith("\n")
    assert 40 <= len(begin + rest) < (4000 if not as_json else 4000 * 40)
    assert list(Path(environ["TMPDIR"]).iterdir()) == []


def test_the_first_ctrl_c_lets_what_has_begun_end_and_cancels_the_rest(environ):
    """One slot, and places for three: one prompt is generating, two wait at the coordinator, two in the program."""
    arguments = [*("--prompt-ids", "1") * 5, "--concurrency", "1", "--queue-limit", "3", "--stream", "--json"]
    arguments += ["--max-tokens", "300", "--ignore-eos"]
    with started(environ, "generate", *TINY, *arguments) as process:
        lines = [process.stdout.readline()]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    lines += out.splitlines()
    found = {json.loads(line)["prompt_index"]: json.loads(line).get("completion") for line in lines}
    assert [found[index]["finish_reason"] for index in range(5)] == ["length", *["cancelled"] * 4]
    assert [found[index]["output_tokens"] for index in range(5)] == [300, 0, 0, 0, 0]
    assert process.returncode == 130
    drained, counted = err.splitlines()
    assert "Ctrl-C again ends at once" in drained
    assert counted == "leafsum: interrupted: 4 of 5 prompts were cancelled before they began"
    assert list(Path(environ["TMPDIR"]).iterdir()) == []


def test_a_lost_gang_is_two_lines_on_standard_error_and_the_result_is_whole(environ):
    arguments = ("generate", *TINY, "--tp", "2", "--prompt", "x", "--max-tokens", "300", "--ignore-eos", "--json")
    with started(environ, *arguments, "--stream") as process:
        lines = [process.stdout.readline()]
        (folder,) = Path(environ["TMPDIR"]).glob("leafsum-*")
        run_id = folder.name.removeprefix("leafsum-")
        pids = rank_pids(run_id)
        os.kill(min(pids), signal.SIGKILL)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0
    lines += out.splitlines()
    found = json.loads(lines[-1])["completion"]
    assert (found["recoveries"], found["tp"], found["output_tokens"]) == (1, 2, 300)
    assert [token for line in lines for token in json.loads(line)["token_ids"]] == found["token_ids"]
    lost, recovered = [line for line in err.splitlines() if "event=gang-" in line]
    assert re.search(rf" warning run={run_id} (rank=\d )?step=\d+ event=gang-lost number=1 num_open=1 cause=", lost)
    assert re.search(
        rf" warning run={run_id} event=gang-recovered number=1 seconds=[\d.]+ tp=2 pids=\d+,\d+$", recovered
    )
    assert not pids.keys() & set(map(int, recovered.rpartition("=")[2].split(",")))


INTERRUPTED_ENCODING = (
    "import hashlib, os, signal; from leafsum.runtime.tokenizer import Tokenizer;"
    "Tokenizer._encode_long = lambda *_: (print('encoding', flush=True), signal.setitimer(0, 0.3),"
    " hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1));"
    "signal.signal(signal.SIGALRM, lambda number, frame: os.kill(os.getpid(), signal.SIGINT))"
)
"""Ctrl-C comes while a text is encoded: one C call, here of many minutes, that hears no signal."""


def test_ctrl_c_while_a_long_prompt_is_encoded_ends_at_once(environ, tmp_path):
    (tmp_path / "long.txt").write_text("hello there world " * 5_000)
    arguments = ("generate", *TINY, "--prompt-file", str(tmp_path / "long.txt"))
    with started(environ, *arguments, code=INTERRUPTED_ENCODING) as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err.strip()) == (130, "encoding\n", "leafsum: interrupted")
    assert list(Path(environ["TMPDIR"]).iterdir()) == []


INTERRUPTED_CLOSE = (
    "import os, signal, leafsum; close = leafsum.WorkerPool.close;"
    "leafsum.WorkerPool.close = lambda pool: (print(pool.run_id, flush=True), signal.setitimer(0, 0.01), close(pool));"
    "signal.signal(signal.SIGALRM, lambda number, frame: os.kill(os.getpid(), signal.SIGINT))"
)
"""Ten milliseconds into the pool's close, which takes several times as long, Ctrl-C comes."""


def test_ctrl_c_while_closing_leaves_nothing_running(environ):
    arguments = ("generate", *TINY, "--tp", "2", "--prompt", "x", "--max-tokens", "2")
    with started(environ, *arguments, code=INTERRUPTED_CLOSE) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err.strip()) == (130, "leafsum: interrupted")
    run_id, *results = out.splitlines()
    assert results == []
    wait_for(lambda: not processes_of(run_id))
    assert list(Path(environ["TMPDIR"]).iterdir()) == []


def test_ctrl_c_during_a_receipt_leaves_nothing_running_and_no_file(environ, tmp_path):
    path = tmp_path / "receipt.json"
    arguments = ("--tp", "2", "--max-tokens", "3000", "--log-level", "info", "--out", str(path))
    with started(environ, "receipt", *TINY[:2], *arguments) as process:
        wait_until_ready(process)
        (folder,) = Path(environ["TMPDIR"]).glob("leafsum-*")
        run_id = folder.name.removeprefix("leafsum-")
        assert len(processes_of(run_id)) == 3
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "leafsum: interrupted"
    assert "Traceback" not in err
    wait_for(lambda: not processes_of(run_id))
    assert list(Path(environ["TMPDIR"]).iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def test_the_demonstration_shows_equal_hashes(environ):
    exit_code, out, err = finish(environ, "demo")
    assert (exit_code, err) == (0, "")
    assert "equal: the same tokens" in out
