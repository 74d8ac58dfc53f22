"""The suites of the benchmark, for real and as small as can be. No speed is asserted."""

import contextlib
import os
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
from leafsum.runtime.bench import blocks, generation, kernels, peer, startup, transport
from leafsum.runtime.bench import helper as helper_module
from leafsum.runtime.bench.aims import AIMS
from leafsum.runtime.bench.helper import Helper
from leafsum.runtime.bench.model import CONFIGS, write_model
from leafsum.runtime.bench.options import FAMILIES, BenchModel
from leafsum.runtime.run_folder import lock_of, remove_abandoned
from leafsum.runtime.sampling import Completion
from leafsum.runtime.settings import Settings
from leafsum.runtime.witness import Progress, RankWitness, Witness
from processes import all_gone, wait_until
from runtime.bench_runs import OF_CPU, OF_RANKS, small_options

from runtime import bench_runs


@pytest.fixture
def options():
    return small_options()


def measure(suite, names, options):
    results = bench_runs.measure(suite, names, options)
    assert all(series.median > 0 for series in results.series)
    return results


def test_kernels(options):
    results = measure(kernels, ["kernels"], options)
    assert [(series.variant, series.figure) for series in results.series[4:]] == [
        ("linear 1 row, 64x48, bfloat16", "GB/s"),
        ("linear 1 row, 32x16, bfloat16", "GB/s"),
        ("deltanet 1,024 rows", "tokens/s"),
        ("deltanet 1 row, its state", "us a row"),
        ("deltanet 1 row, its state", "GB/s"),
        ("causal_conv 1,024 rows, 10,240 channels", "tokens/s"),
        ("causal_conv 1 row, 10,240 channels", "us a row"),
        ("mixer 1,024 rows, 4 streams", "tokens/s"),
        ("mixer 1 row, 4 streams", "us a row"),
        ("select_keys 1 row, 32,768 keys", "us a row"),
        ("select_keys 64 rows, 32,768 keys", "us a row"),
        ("linear 3 rows, 64x48, bfloat16", "GFLOP/s"),
        ("torch matmul 3 rows, 64x48, float32", "GFLOP/s"),
        ("linear 3 rows, 32x16, bfloat16", "GFLOP/s"),
        ("torch matmul 3 rows, 32x16, float32", "GFLOP/s"),
    ]
    assert set(results.values) == {"linear_1_row"}, "an aim of 256 rows says nothing of 3"


def test_kernels_at_the_rows_of_the_aim(options, monkeypatch):
    monkeypatch.setattr(blocks, "variants", lambda _: [])
    results = measure(kernels, ["kernels"], replace(options, num_rows=256, shapes=options.shapes[:1]))
    assert set(results.values) == {"linear_1_row", "linear_256_rows"}


def test_decode_and_prompt_take_turns_on_the_same_pools(options):
    results = measure(generation, ["decode", "prompt"], replace(options, new_tokens=64, num_requests=3))
    one, two = (f"leafsum, tp {tp}, 1 thread a rank" for tp in (1, 2))
    found = [(series.suite, series.model, series.variant, series.figure) for series in results.series]
    assert found == [
        *(
            ("decode", "tiny", f"{name}{label}", figure)
            for label in ("", ", 3 requests")
            for name, figures in ((one, OF_CPU), (two, (*OF_CPU, *OF_RANKS)))
            for figure in ("tokens/s", *figures)
        ),
        ("prompt", "tiny", one, "tokens/s"),
        ("prompt", "tiny", two, "tokens/s"),
    ]
    ((key, share),) = results.values.items()
    assert key == f"exchange {load_spec(ensure_tiny()).family}"
    medians = {(series.variant, series.figure): series.median for series in results.series}
    calls, exchanges = (medians[two, figure] for figure in OF_RANKS)
    assert calls < exchanges == share < 100


def subject(name, rate):
    return generation.Subject(lambda _: (name, lambda: {"tokens/s": rate}))


def test_ratios_are_to_transformers_and_of_a_family(options, monkeypatch, tmp_path):
    """Of one request, of the first rank count: the rates of several at once would make another ratio."""
    rates = {"tp 1": 30.0, "tp 2": 100.0}
    monkeypatch.setattr(generation, "_open_pool", lambda *words: subject(f"tp {words[-1]}", rates[f"tp {words[-1]}"]))
    monkeypatch.setattr(generation, "_open_peers", lambda *_: [subject("transformers", 20.0)])
    monkeypatch.setattr(generation, "AIM_TP", 3)
    for family in FAMILIES:
        (tmp_path / family).mkdir()
        write_small(family, tmp_path / family)
    models = tuple(BenchModel(f"a {family}", tmp_path / family) for family in FAMILIES)
    results = measure(generation, ["decode", "prompt"], replace(options, models=models, num_requests=2))
    assert results.values == {
        "decode qwen3_moe": 1.5,
        "prompt qwen3_moe": 1.5,
        "decode qwen4_exp": 1.5,
        "prompt qwen4_exp": 1.5,
    }
    assert set(results.values) < {aim.key for aim in AIMS}
    assert [series.model for series in results.series] == ["a qwen3_moe"] * 9 + ["a qwen4_exp"] * 9


def test_several_requests_make_half_the_tokens_and_everybody_gets_the_same(options):
    one, several = generation._works("decode", 259, replace(options, num_requests=3))
    assert [len(ids) for ids in several.prompts] == [8] * 3
    assert several.prompts[0] == one.prompts[0] != several.prompts[1]
    assert (one.new_tokens, several.new_tokens) == (4, 2)
    (prompt,) = generation._works("prompt", 259, options)
    assert (len(prompt.prompts), prompt.num_prompt_tokens, prompt.new_tokens) == (1, 16, 1)


class SteppingPool:
    """Two requests: the first has two tokens before the second's prompt is done."""

    settings = Settings()
    coordinator_pid = os.getpid()
    num_asked = 0

    def witness(self):
        self.num_asked += 1
        rank = RankWitness(0, 7, 0, 0, 0, {}, "nodes", "none", 1, False, cpu_ns=9 * self.num_asked)
        return Witness(3 * self.num_asked, 1, 1, (rank,))

    def generate(self, prompts, _sampling, on_progress):
        for done, tokens in [(4, 0), (4, 1), (6, 2), (8, 3), (8, 4), (8, 5), (8, 6), (8, 6)]:
            on_progress(Progress(0, len(prompts), done, tokens))
        return []


def test_a_rate_begins_where_every_request_has_a_token(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(generation.time, "perf_counter", lambda: next(clock))
    work = generation.Work("decode", ", 2 requests", [[1] * 4] * 2, 3)
    times = generation._run(SteppingPool(), work)
    assert (times.first_s, times.last_s, times.tokens_after_first) == (2, 5, 3)
    found = generation._decode(SteppingPool(), work)
    assert (found["tokens/s"], set(found)) == (0.75, {"tokens/s", *OF_CPU}), "a second is spent on asking"
    assert generation._peer_rate({"decode_s": 2.0, "prompt_s": 4.0}, work) == {"tokens/s": 2.0}
    assert generation._peer_rate({"decode_s": 0.0, "prompt_s": 4.0}, replace(work, suite="prompt")) == {"tokens/s": 2.0}


def test_without_transformers_there_is_a_note(options, monkeypatch):
    monkeypatch.setattr(generation, "find_spec", lambda _: None)
    monkeypatch.setattr(generation, "_open_pool", lambda *_: subject("leafsum", 1.0))
    results = measure(generation, ["prompt"], replace(options, with_transformers=True, rank_counts=(1,)))
    assert results.notes == ["transformers is not installed here: nothing to compare decode and prompt with"]
    assert [series.variant for series in results.series] == ["leafsum"]


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_transformers_writes_what_a_pool_writes(tmp_path):
    prompts = [[72, 105, 32, 116], [1, 2, 3, 4]]
    write_small("qwen4_exp", tmp_path)
    with WorkerPool(model=str(tmp_path), dtype="float32", threads=1) as pool:
        completions = pool.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))
    with Helper("transformers", "leafsum.runtime.bench.peer", [str(tmp_path), "1"]) as helper:
        question = {"prompts": prompts, "new_tokens": 6}
        dtype, code = helper.ask(question)["way"].split(", ")
        assert dtype in peer.DTYPES
        assert code in peer.EXPERT_CODES
        answer = helper.ask(question | {"way": "float32, eager"})
    assert answer["token_ids"] == [list(completion.token_ids) for completion in completions]
    assert min(answer["prompt_s"], answer["decode_s"]) > 0


class TimedPeer(peer.Peer):
    """Whose ways take what `taken_s` says, the first two times a second more."""

    def __init__(self, taken_s):
        self.taken_s, self.asked = taken_s, []

    def complete(self, prompts, new_tokens, way):
        self.asked.append((way, len(prompts[0]), new_tokens))
        is_slow = sum(asked == way for asked, _, _ in self.asked) <= 2
        return {figure: time_s + is_slow for figure, time_s in self.taken_s[way].items()}


def test_the_fastest_way_is_that_of_the_work_and_no_hopeless_one_is_tried_twice():
    names = ["float32, grouped_mm", "float32, eager", "bfloat16, grouped_mm", "bfloat16, eager"]
    decode_s, prompt_s = [2.0, 1.5, 9.0, 9.0], [1.0, 2.0, 1.5, 9.0]
    ways = {
        name: {"decode_s": decode, "prompt_s": prompt}
        for name, decode, prompt in zip(names, decode_s, prompt_s, strict=True)
    }
    assert TimedPeer(ways).answer([[1] * 500], 64) == {"way": "float32, eager"}
    tried = TimedPeer(ways)
    assert tried.answer([[1] * 500], 1) == {"way": "float32, grouped_mm"}
    assert tried.asked == [(name, 128, 1) for name in [*names, *3 * names[:3]]]


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
    work = generation.Work("decode", "", [[1]], 4)
    for measure_once in (generation._decode, generation._prompt):
        with pytest.raises(LeafsumError, match="request that is measured failed at tp 1: not finite from layer 0 on"):
            measure_once(FailingPool(), work)


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
    startup.timed(program("import os; print(os.environ['LEAFSUM_RECOVER'])"), re.compile(b"never"))()
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


def write_small(family, folder):
    """Of the same form as the model made for bench."""
    write_model(folder, CONFIGS[family] | {"vocab_size": 128, "num_experts": 16, "ngram_vocab_size_base": 64})


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_can_be_served_and_is_the_same_every_time(family, tmp_path):
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
        write_small(family, folder)
    spec, checkpoint = load_spec(folders[0]), Checkpoint.open(folders[0])
    assert spec.family == family
    checkpoint.check(expected_tensors(spec, checkpoint.entries))
    first, second = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert first == second


def test_flash_next_has_every_kind_of_block():
    assert tuple(CONFIGS) == FAMILIES
    config = CONFIGS["qwen4_exp"]
    assert set(config["layer_types"]) == {"linear_attention", "full_attention"}
    assert config["ple_layer_ids"]
    assert config["indexer_budget"] <= 128, "decode, at positions from 128 on, is to choose keys"
