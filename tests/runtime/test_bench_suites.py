"""The suites of the benchmark, for real and as small as can be. No speed is asserted."""

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec

import pytest
from leafsum import SamplingParams, WorkerPool
from leafsum.errors import DeadlineExceeded, LeafsumError
from leafsum.ranks.checkpoint import Checkpoint
from leafsum.ranks.configs.load import load_spec
from leafsum.ranks.sizes import expected_tensors
from leafsum.ranks.tiny import ensure_tiny
from leafsum.runtime.bench import generation, kernels, startup, transport
from leafsum.runtime.bench import helper as helper_module
from leafsum.runtime.bench.helper import Helper
from leafsum.runtime.bench.model import CONFIG, write_model
from leafsum.runtime.bench.options import BenchOptions, Shape
from leafsum.runtime.bench.results import Results
from leafsum.runtime.bench.rounds import Rounds
from leafsum.runtime.run_folder import lock_of, remove_abandoned
from leafsum.runtime.sampling import Completion
from leafsum.runtime.settings import Settings
from processes import all_gone, wait_until


@pytest.fixture
def options():
    return BenchOptions(
        settings=Settings(threads=1),
        model_dir=ensure_tiny(),
        model_name="tiny",
        shapes=(Shape(64, 48), Shape(32, 16)),
        num_rows=3,
        rank_counts=(1, 2),
        with_transformers=False,
        prompt_tokens=8,
        new_tokens=4,
        long_prompt_tokens=16,
        gather_bytes=10240,
        gather_ranks=(4,),
        gather_calls=3,
        read_bytes=1 << 16,
    )


def measure(suite, names, options):
    results = Results()
    suite.measure(names, options, Rounds(1, lambda _: None), results)
    assert all(len(series.samples) == 1 and series.median > 0 for series in results.series)
    return results


def test_kernels(options):
    results = measure(kernels, ["kernels"], options)
    assert [(series.variant, series.figure) for series in results.series[-6:]] == [
        ("linear 1 row, 64x48, bfloat16", "GB/s"),
        ("linear 1 row, 32x16, bfloat16", "GB/s"),
        ("linear 3 rows, 64x48, bfloat16", "GFLOP/s"),
        ("torch matmul 3 rows, 64x48, float32", "GFLOP/s"),
        ("linear 3 rows, 32x16, bfloat16", "GFLOP/s"),
        ("torch matmul 3 rows, 32x16, float32", "GFLOP/s"),
    ]
    assert set(results.values) == {"linear_1_row"}, "an aim of 256 rows says nothing of 3"


def test_kernels_at_the_rows_of_the_aim(options):
    results = measure(kernels, ["kernels"], replace(options, num_rows=256, shapes=options.shapes[:1]))
    assert set(results.values) == {"linear_1_row", "linear_256_rows"}


def test_decode_and_prompt_take_turns_on_the_same_pools(options):
    results = measure(generation, ["decode", "prompt"], replace(options, new_tokens=64))
    assert [(series.suite, series.variant, series.figure) for series in results.series] == [
        ("decode", "leafsum, tp 1, 1 thread a rank", "tokens/s"),
        ("decode", "leafsum, tp 2, 1 thread a rank", "tokens/s"),
        ("decode", "leafsum, tp 2, 1 thread a rank", "% in transport calls"),
        ("decode", "leafsum, tp 2, 1 thread a rank", "% in exchanges"),
        ("prompt", "leafsum, tp 1, 1 thread a rank", "tokens/s"),
        ("prompt", "leafsum, tp 2, 1 thread a rank", "tokens/s"),
    ]
    assert set(results.values) == {"exchange"}
    calls, exchanges = (series.median for series in results.series[2:4])
    assert calls < exchanges == results.values["exchange"] < 100


def test_ratios_are_to_the_better_transformers(options, monkeypatch):
    rates = {"leafsum, tp 1, 1 thread a rank": 30.0, "float32": 20.0, "bfloat16": 10.0}

    def subject(name):
        return generation.Subject(name, lambda: {"tokens/s": rates[name]}, lambda: {"tokens/s": rates[name]})

    monkeypatch.setattr(generation, "_open_pool", lambda *_: subject("leafsum, tp 1, 1 thread a rank"))
    monkeypatch.setattr(generation, "_open_helpers", lambda *_: {"float32": None, "bfloat16": None})
    monkeypatch.setattr(generation, "_peer", lambda dtype, *_: subject(dtype))
    results = measure(generation, ["decode", "prompt"], replace(options, rank_counts=(1,)))
    assert results.values == {"decode": 1.5, "prompt": 1.5}


def test_without_transformers_there_is_a_note(options, monkeypatch):
    monkeypatch.setattr(generation, "find_spec", lambda _: None)
    results = Results()
    with ExitStack() as stack:
        wanted = replace(options, with_transformers=True)
        assert generation._open_helpers(stack, ensure_tiny(), wanted, results) == {}
    assert results.notes == ["transformers is not installed here: nothing to compare decode and prompt with"]


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_transformers_writes_what_a_pool_writes():
    prompt_ids = [72, 105, 32, 116]
    with WorkerPool(model="tiny", dtype="float32", threads=1) as pool:
        (completion,) = pool.generate([prompt_ids], SamplingParams(max_tokens=6, ignore_eos=True))
    folder = str(ensure_tiny())
    with Helper("transformers", "leafsum.runtime.bench.peer", [folder, "float32", "1"]) as helper:
        answer = helper.ask({"prompt_ids": prompt_ids, "new_tokens": 6})
    assert answer["token_ids"] == list(completion.token_ids)
    assert min(answer["prompt_s"], answer["decode_s"]) > 0


def test_transport(options):
    results = measure(transport, ["transport"], options)
    assert [(series.variant, series.figure) for series in results.series] == [
        ("shared memory, 10,240 bytes, 4 ranks", "ms, median"),
        ("shared memory, 10,240 bytes, 4 ranks", "ms, p95"),
        ("Gloo, 10,240 bytes, 4 ranks", "ms, median"),
        ("Gloo, 10,240 bytes, 4 ranks", "ms, p95"),
    ]
    assert set(results.values) == {"all_gather"}


def test_a_gang_goes_with_its_first_rank():
    """Also before its ranks have met, when no transport could tell them."""
    code = """
import os, time
from leafsum.ranks.latency import _fork_ranks
_fork_ranks(3)
os.write(1, f"{os.getpid()}\\n".encode())
time.sleep(120)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        lines = [first.stdout.readline() for _ in range(3)]
        first.kill()
    others = {int(line) for line in lines} - {first.pid}
    assert len(others) == 2
    wait_until(lambda: all_gone(others), "the other ranks are gone")


class FailingPool:
    settings = Settings()

    def generate(self, *_args, **_fields):
        return [Completion("x", (1,), (), "", "failed", "", None, "", 1, error="not finite from layer 0 on")]


def test_a_request_that_fails_alone_fails_the_suite():
    text = "the request that is measured failed at tp 1: not finite from layer 0 on"
    with pytest.raises(LeafsumError, match=text):
        generation._decode(FailingPool(), [1], 4)
    with pytest.raises(LeafsumError, match=text):
        generation._token_times_s(FailingPool(), [1], 1)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Writes a module of that code, and says how to run it."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(code):
        (tmp_path / "some_program.py").write_text(code)
        return ["some_program"]

    return write


def test_startup_is_timed_to_a_text_and_to_the_end(program, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(startup.time, "perf_counter", lambda: next(clock))
    written = program("import sys, time\nfor word in ('a', 'b', 'c'): print(word, flush=True)\n")
    assert startup.timed(written)() == {"s": 1}
    assert startup.timed(written, re.compile(b"^b$", re.MULTILINE))() == {"s": 1}
    assert next(clock) == 5, "the text was timed when it came, once"


@pytest.mark.parametrize("code", ["time.sleep(600)", "os.close(1); os.close(2); time.sleep(600)"])
def test_a_program_that_does_not_end_fails_the_suite_and_is_killed(program, code):
    text = "expected the end of `python -m some_program` within 0.3 s, found it running; it was killed"
    with pytest.raises(DeadlineExceeded, match=text):
        startup.timed(program(f"import os, time\n{code}\n"), timeout_s=0.3)()


def test_a_program_that_fails_or_says_something_else_fails_the_suite(program):
    with pytest.raises(LeafsumError, match=r"(?s)`python -m leafsum no-such` to succeed, found exit code 2: .*No such"):
        startup.timed(["leafsum", "no-such"])()
    with pytest.raises(LeafsumError, match=r"some_program` to write 'b', and to succeed, found exit code 0: a"):
        startup.timed(program("print('a')"), re.compile(b"b"))()


def test_a_helper_that_ends_is_quoted(tmp_path, monkeypatch):
    (tmp_path / "short_lived.py").write_text("import sys\nsys.exit('it could not go on')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    text = r"an answer of a helper, but it ended \(exit code 1\): it could not go on"
    with Helper("a helper", "short_lived", []) as helper, pytest.raises(LeafsumError, match=text):
        helper.ask({})


def test_a_helper_that_says_nothing_runs_out_of_time(tmp_path, monkeypatch):
    (tmp_path / "silent.py").write_text("import sys\nsys.stdin.read()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    text = "an answer of a helper within 0.01 s, found none; its last words: it said nothing"
    with Helper("a helper", "silent", []) as helper, pytest.raises(LeafsumError, match=text):
        helper.ask({}, timeout_s=0.01)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_helper_whose_answer_nobody_reads_is_not_waited_for(interrupted, tmp_path, monkeypatch):
    work = "sleep(600)" if interrupted else "sleep(0)"
    code = f"""
from time import sleep
from leafsum.ranks.json_lines import serve_lines
serve_lines(lambda: lambda question: {work} or {{"long": "x" * 1_000_000}})
"""
    (tmp_path / "wordy.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(helper_module, "LEAVE_TIMEOUT_S", 300.0)
    begin_s = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt), Helper("a helper", "wordy", []) as helper:
        helper._questions.write(b"{}\n")
        helper._questions.flush()
        if interrupted:
            raise KeyboardInterrupt
    assert time.monotonic() - begin_s < 60
    assert helper._process.returncode == (-signal.SIGKILL if interrupted else 1)


def test_a_gang_has_a_run_folder_which_is_held_and_goes(options, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ExitStack() as stack:
        transport._timed(stack, "shared", 1, options)
        (folder,) = tmp_path.iterdir()
        assert lock_of(folder).exists()
        remove_abandoned(tmp_path)
        assert folder.exists(), "held"
    assert list(tmp_path.iterdir()) == []


def test_what_a_helper_prints_is_no_answer(tmp_path, monkeypatch):
    code = """
from leafsum.ranks.json_lines import serve_lines
def start():
    print("hello")
    return lambda question: print("asked") or {"twice": 2 * question["number"]}
serve_lines(start)
"""
    (tmp_path / "chatty.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Helper("a helper", "chatty", []) as helper:
        assert [helper.ask({"number": number})["twice"] for number in (1, 2)] == [2, 4]


def test_the_model_can_be_served_and_is_the_same_every_time(tmp_path):
    config = CONFIG | {"vocab_size": 64, "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2}
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
        write_model(folder, config)
    checkpoint = Checkpoint.open(folders[0])
    checkpoint.check(expected_tensors(load_spec(folders[0]), checkpoint.entries))
    first, second = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert first == second
