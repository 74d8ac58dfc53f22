"""The command line over a pool without processes: what it prints where, exit codes, and one paragraph an error."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import fake_pool
import pytest
from leafsum.errors import ModelError, RankError, RankLost, RequestFailed
from leafsum.ranks.tiny import ensure_tiny
from leafsum.runtime.commands.main import run
from leafsum.runtime.settings import RULES, flag_of

GENERATE = ("--model", "tiny", "--prompt", "Once", "--max-tokens", "4")


@pytest.fixture
def script(monkeypatch):
    return fake_pool.install(monkeypatch)


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from leafsum.runtime.commands.main import run; run(['generate', '--help']); run(['--help']);"
        "print([m for m in ('torch', 'numpy', 'rich', 'zmq', 'msgspec', 'tokenizers', 'jinja2', 'huggingface_hub',"
        " 'safetensors') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_module_and_entry_point_are_the_same_command():
    done = subprocess.run([sys.executable, "-m", "leafsum", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: leafsum [OPTIONS] COMMAND")


@pytest.mark.parametrize("command", ["generate", "receipt", "inspect", "doctor", "demo"])
def test_every_command_teaches_by_example(command, capfd):
    assert run([command, "--help"]) == 0
    assert f"leafsum {command}" in capfd.readouterr().out.split("Example")[1]


def test_generate_has_every_setting_as_a_flag(capfd):
    assert run(["generate", "--help"]) == 0
    text = capfd.readouterr().out
    flags = {name for name in RULES if re.search(rf"^  {flag_of(name)}\b", text, re.MULTILINE)}
    assert flags == {name for name, rule in RULES.items() if not rule.for_receipts}


def test_json_is_one_object_a_prompt_in_order_and_nothing_else(script, capfd):
    assert run(["generate", *GENERATE, "--prompt", "zwei\u2028ß", "--prompt-ids", "5,6", "--tp", "2", "--json"]) == 0
    out, err = capfd.readouterr()
    found = [json.loads(line) for line in out.splitlines()]
    assert [each["prompt"] for each in found] == ["Once", "zwei\u2028ß", None]
    assert [each["prompt_tokens"] for each in found] == [4, 9, 2]
    assert all((each["tp"], each["output_tokens"], len(each["token_ids"])) == (2, 4, 4) for each in found)
    assert not any("logits_sha256" in each for each in found)
    assert err == ""
    assert (script.opened, script.closed) == (1, 1)


@pytest.mark.usefixtures("script")
def test_digests_add_the_hash_of_logits(capfd):
    assert run(["generate", *GENERATE, "--json", "--digests"]) == 0
    assert re.fullmatch("[0-9a-f]{64}", json.loads(capfd.readouterr().out)["logits_sha256"])


@pytest.mark.usefixtures("script")
def test_text_alone_for_one_prompt_and_marked_for_several(capfd):
    assert run(["generate", *GENERATE]) == 0
    (text,) = capfd.readouterr().out.splitlines()
    assert run(["generate", *GENERATE, "--prompt", "x"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[:3] == ["--- prompt 1 of 2 ---", text, "--- prompt 2 of 2 ---"]


def failing(*indices):
    """Spoils the completions of these prompts: each request failed alone."""

    def spoil(_settings, index, completion):
        failed = {"finish_reason": "failed", "text": "", "token_ids": (), "error": f"not finite from layer {index} on"}
        return fake_pool.replace(completion, **failed) if index in indices else completion

    return spoil


def test_a_request_that_failed_alone_is_told_and_the_others_are_printed(script, capfd):
    script.spoil = failing(1)
    assert run(["generate", *GENERATE, "--prompt", "bad", "--prompt", "good"]) == 1
    out, err = capfd.readouterr()
    assert out.splitlines()[::2] == ["--- prompt 1 of 3 ---", "--- prompt 3 of 3 ---"]
    assert err == "leafsum: 1 of 3 prompts failed: prompt 2: not finite from layer 1 on\n"


def test_json_has_an_object_for_every_prompt_also_one_that_failed(script, capfd):
    script.spoil = failing(0, 2)
    assert run(["generate", *GENERATE, "--prompt", "good", "--prompt", "bad", "--json"]) == 1
    out, err = capfd.readouterr()
    found = [json.loads(line) for line in out.splitlines()]
    assert [each["finish_reason"] for each in found] == ["failed", "length", "failed"]
    assert [each.get("error") for each in found] == ["not finite from layer 0 on", None, "not finite from layer 2 on"]
    assert err.startswith("leafsum: 2 of 3 prompts failed: prompt 1: ")
    assert err.count("\n") == 1


def test_the_demonstration_fails_where_its_prompt_does(script, capfd):
    script.spoil = failing(0)
    assert run(["demo"]) == 1
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "prompt 1: not finite" in err


def test_without_a_tokenizer_ids_are_printed(script, capfd):
    script.spoil = lambda _settings, _index, completion: fake_pool.replace(completion, text=None)
    assert run(["generate", "--prompt-ids", "1,2", "--max-tokens", "2"]) == 0
    assert re.fullmatch(r"\d+,\d+\n", capfd.readouterr().out)


def test_flags_and_variables_reach_the_pool(script, monkeypatch):
    monkeypatch.setenv("LEAFSUM_KV_TOKENS", "1024")
    assert run(["generate", *GENERATE, "--tp", "3", "--exchange", "slots", "--prefill-chunk", "whole"]) == 0
    (settings,) = script.settings
    assert (settings.tp, settings.exchange, settings.prefill_chunk, settings.kv_tokens) == (3, "slots", 0, 1024)


@pytest.mark.usefixtures("script")
def test_chat_applies_the_template_and_keeps_the_prompt_as_given(capfd, tmp_path):
    shutil.copy(ensure_tiny() / "config.json", tmp_path)
    fake_pool.byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("[{{ messages[0].role }}]{{ messages[0].content }}")
    assert run(["generate", "--model", str(tmp_path), "--chat", "--prompt", "hi", "--max-tokens", "1", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["prompt"], found["prompt_tokens"]) == ("hi", len("[user]hi"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["generate"], "no prompt: expected at least one --prompt"),
        (["generate", "--prompt", ""], "--prompt: the prompt is empty"),
        (["generate", *GENERATE, "--max-tokens", "0"], "max_tokens: expected an integer of at least 1, found 0"),
        (["generate", *GENERATE, "--max-tokens", "-3"], "max_tokens: expected an integer of at least 1, found -3"),
        (["generate", *GENERATE, "--max-tokens", "x"], "Invalid value for '--max-tokens'"),
        (["generate", *GENERATE, "--device", "cuda"], "device: 'cuda' is not in this version"),
        (["generate", *GENERATE, "--tp", "0"], "--tp: expected an integer of at least 1"),
        (["generate", *GENERATE, "--thread", "1"], "Did you mean"),
        (["generate", "--prompt-ids", "1,b"], "--prompt-ids: expected integers"),
        (["generate", "--prompt-file", "/nonexistent"], "prompt file /nonexistent: cannot be read"),
        (["generate", "--prompt-ids", "1", "--chat"], "--chat: expected texts, found --prompt-ids"),
        (["generate", "--model", "/", "--prompt", "x"], "expected config.json in /"),
        (["generate", "--prompt", "x", "--max-context", "1000000"], "max_context: expected at most"),
        (
            ["generate", "--prompt", "x", "--prompt-ids", "1,2", "--prompt-ids", "1,100000"],
            "prompt 3 (--prompt-ids): expected a token id of 0 to 258, found 100000 as entry 2",
        ),
        (
            ["generate", "--prompt", "x", "--prompt", "x" * 40000],
            "prompt 2 (--prompt): a prompt of 40,000 tokens with max_tokens 128 needs 40,128 positions",
        ),
        (["receipt", "--prompt", "x", "--prompt-ids", "1,100000"], "prompt 2 (--prompt-ids): expected a token id of"),
        (["receipt", "--prompt", "x" * 40000], "prompt 1 (--prompt): a prompt of 40,000 tokens"),
        (["genrate"], "No such command 'genrate'. Did you mean 'generate'?"),
        (["generate", "--promt", "x"], "No such option '--promt'. (Did you mean one of: '--prompt'"),
        (["generate", *GENERATE, "--placement", "stridet"], "found 'stridet'; did you mean strided?"),
        (["generate", *GENERATE, "--exchange", "slot"], "found 'slot'; did you mean slots?"),
        (["generate", *GENERATE, "--transport", "glo"], "found 'glo'; did you mean gloo?"),
        (["generate", *GENERATE, "--stop", ""], "stop: expected texts of 1 to 4096 characters, found 0"),
        (["generate", *GENERATE, "--prompt", "x", "--stream"], "--stream: expected one prompt, found 2; add --json"),
        (["inspect", "--model", "/nonexistent/model"], "model: there is no folder /nonexistent/model"),
        (["receipt", "--tp", "1,1"], "--tp: expected different values, found '1,1'"),
        (["receipt", "--tp", "1,x"], "--tp: expected an integer of at least 1 and at most 4,096, found 'x'"),
    ],
)
def test_wrong_use_is_exit_code_2_before_any_pool(arguments, text, script, capfd):
    assert run(arguments) == 2
    out, err = capfd.readouterr()
    assert text in err
    assert "Traceback" not in err
    assert out == ""
    assert script.opened == 0


@pytest.mark.parametrize("chat", [[], ["--chat"]])
def test_a_text_for_a_folder_without_a_tokenizer_is_refused_before_any_pool(chat, script, capfd, tmp_path):
    shutil.copy(ensure_tiny() / "config.json", tmp_path)
    assert run(["generate", "--model", str(tmp_path), "--prompt-file", __file__, *chat]) == 2
    assert "has no tokenizer.json; give --prompt-ids instead of texts" in capfd.readouterr().err
    assert script.opened == 0


def test_an_unknown_variable_is_refused(script, monkeypatch, capfd):
    monkeypatch.setenv("LEAFSUM_THREDS", "1")
    assert run(["generate", *GENERATE]) == 2
    assert "did you mean LEAFSUM_THREADS?" in capfd.readouterr().err
    assert script.opened == 0


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (RankLost("rank 1 of 2 is gone", role="rank 1", exit_status=-9), 1),
        (RequestFailed("prompt 1: not finite"), 1),
        (ModelError("the tensors do not fit"), 2),
        (ZeroDivisionError("a defect"), 1),
    ],
)
def test_errors_are_one_paragraph_and_close_the_pool(error, exit_code, script, capfd):
    script.fail = error
    assert run(["generate", *GENERATE]) == exit_code
    err = capfd.readouterr().err
    assert err.startswith("leafsum: ")
    assert str(error) in err
    assert err.count("\n") == 1
    assert script.closed == 1


@pytest.mark.parametrize("debug", [(), ("--debug",)])
def test_errors_hold_no_control_characters(debug, script, capfd):
    script.fail = RankError("file a\x1b[2Jb\r\x9b", rank=1, step=3, traceback_text="at \x1b]0;c")
    assert run(["generate", *GENERATE, *debug]) == 1
    err = capfd.readouterr().err
    assert "file a\ufffd[2Jb\ufffd\ufffd\n" in err
    assert [c for c in err if c != "\n" and not c.isprintable()] == []


def test_debug_shows_the_traceback_and_the_ranks_own(script, capfd):
    events = ("-0.002 s step 3 plan", "-0.001 s step 3 failed")
    script.fail = RankError("rank 1 failed", rank=1, step=3, traceback_text="File engine.py, line 7", events=events)
    assert run(["generate", *GENERATE, "--debug"]) == 1
    err = capfd.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert "File engine.py, line 7" in err
    assert "\n-0.002 s step 3 plan\n-0.001 s step 3 failed\n" in err
    script.fail = ZeroDivisionError("x")
    run(["--debug", "generate", *GENERATE])
    assert "Traceback" in capfd.readouterr().err


# Buffered output, as a user has it, fails when it is flushed: later than the write, and once more at exit.
ENVIRON = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "PYTHONUNBUFFERED": "", "TERM": "xterm"}


def command(statement, *arguments, prefix=(), **kwargs):
    """A process that runs the command line over the fake pool, after `statement`."""
    code = f"import fake_pool, pytest; fake_pool.install(pytest.MonkeyPatch()); {statement}"
    code += f"; from leafsum.runtime.commands.main import main; main({list(arguments)!r})"
    words = [*prefix, sys.executable, "-c", code]
    return subprocess.run(words, **{"stderr": subprocess.PIPE, "env": ENVIRON, "timeout": 60, **kwargs})


@pytest.mark.parametrize(
    "arguments", [["generate", *GENERATE, "--json"], ["generate", *GENERATE], ["demo"], ["doctor"]]
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_told(arguments, unbuffered):
    with open("/dev/full", "w") as full:
        done = command("pass", *arguments, stdout=full, env={**ENVIRON, "PYTHONUNBUFFERED": unbuffered})
    assert done.stderr == (
        b"leafsum: standard output cannot be written: No space left on device; the result is lost, write it elsewhere\n"
    )
    assert done.returncode == 1


def test_a_closed_output_is_told_before_anything_runs():
    statement = "fake_pool.FakePool.script.fail = AssertionError('ran')"
    done = command(statement, "generate", *GENERATE, prefix=("sh", "-c", 'exec "$0" "$@" >&-'))
    assert done.stderr.startswith(b"leafsum: standard output is closed")
    assert done.returncode == 1


def test_a_reader_that_has_gone_is_no_error_text():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        done = command("pass", "generate", *GENERATE, "--json", stdout=pipe)
    assert done.stderr == b""
    assert done.returncode == 1


def test_ctrl_c_is_exit_code_130_and_one_line():
    done = command(
        "fake_pool.FakePool.script.fail = KeyboardInterrupt()", "generate", *GENERATE, stdout=subprocess.PIPE
    )
    assert done.stderr.strip() == b"leafsum: interrupted"
    assert done.returncode == 130
    assert done.stdout == b""


def test_ctrl_c_while_commands_are_imported_is_no_traceback():
    code = (
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'click': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from leafsum.runtime.commands.main import main; main(['doctor'])"
    )
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, env=ENVIRON, timeout=60)
    assert (done.returncode, done.stderr) == (130, b"leafsum: interrupted\n")


def test_progress_is_shown_on_a_terminal_only():
    leader, follower = pty.openpty()
    done = command("pass", "generate", *GENERATE, stdout=subprocess.PIPE, stderr=follower)
    os.close(follower)
    assert b"closing" in os.read(leader, 1 << 16)  # the last stage; one that takes no time may never be drawn
    os.close(leader)
    assert done.stdout.count(b"\n") == 1


def test_nothing_is_counted_where_no_terminal_shows_it(monkeypatch, capfd, script):
    asked = []
    result = fake_pool.FakeStream.result

    def note(self, on_progress):
        asked.append(on_progress)
        return result(self, on_progress)

    monkeypatch.setattr(fake_pool.FakeStream, "result", note)
    assert run(["generate", *GENERATE]) == 0
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    assert run(["generate", *GENERATE]) == 0
    assert [each is None for each in asked] == [True, False]
    assert (script.opened, capfd.readouterr().out.count("\n")) == (2, 2)


def test_a_terminal_gets_no_control_characters(script, capfd, monkeypatch):
    script.spoil = lambda _settings, _index, completion: fake_pool.replace(completion, text="a\x1b[2Jb\x07\n\tc")
    assert run(["generate", *GENERATE]) == 0
    assert capfd.readouterr().out == "a\x1b[2Jb\x07\n\tc\n"
    monkeypatch.setattr("leafsum.runtime.commands.generate.on_terminal", lambda: True)
    assert run(["generate", *GENERATE]) == 0
    assert capfd.readouterr().out == "a\ufffd[2Jb\ufffd\n\tc\n"


@pytest.mark.usefixtures("script")
def test_demo_shows_text_and_equal_hashes(capfd):
    assert run(["demo"]) == 0
    out = capfd.readouterr().out
    hashes = re.findall(r"tp (\d): token sha256 ([0-9a-f]{64})", out)
    assert [tp for tp, _ in hashes] == ["1", "2"]
    assert hashes[0][1] == hashes[1][1]
    assert "equal: the same tokens" in out


def test_demo_fails_where_tokens_or_hidden_bits_differ(script, capfd):
    def other_bits(settings, _index, completion):
        return fake_pool.replace(completion, residual_hash="f" * 16) if settings.tp == 2 else completion

    for spoil in (
        lambda settings, _index, completion: fake_pool.with_token(completion, 3, settings.tp),
        other_bits,
    ):
        script.spoil = spoil
        assert run(["demo"]) == 1
        out, err = capfd.readouterr()
        assert "expected the same tokens and hidden bits at tp 1 and 2" in err
        assert "equal:" not in out
