"""`leafsum generate --stream` and `--stop`, over a pool without processes."""

import json
import shutil

import fake_pool
import pytest
from leafsum.ranks.tiny import ensure_tiny
from leafsum.runtime.bench.startup import FIRST_TEXT
from leafsum.runtime.commands import demo, generate, stream_text
from leafsum.runtime.commands.main import run

GENERATE = ("generate", "--model", "tiny", "--prompt", "Once", "--max-tokens", "4")


@pytest.fixture
def script(monkeypatch):
    return fake_pool.install(monkeypatch)


@pytest.mark.usefixtures("script")
def test_the_streamed_text_is_the_text(capfd):
    assert run(GENERATE) == 0
    expected = capfd.readouterr()
    assert run([*GENERATE, "--stream"]) == 0
    assert capfd.readouterr() == expected


@pytest.mark.usefixtures("script")
def test_text_is_flushed_piece_by_piece(monkeypatch):
    written = []
    monkeypatch.setattr(stream_text, "write", written.append)
    monkeypatch.setattr(stream_text, "flush_output", lambda: written.append("flush"))
    assert run([*GENERATE, "--stream"]) == 0
    assert written[1::2] == ["flush"] * 5
    assert [len(piece) for piece in written[::2]] == [1, 1, 1, 1, 0]


def test_the_demonstration_shows_the_first_text_as_it_comes(script, capfd, monkeypatch):
    """Every piece is in the pipe before the next, the heading with the first; the second pool starts after all that."""
    told = []
    real_flush = stream_text.flush_output

    def flush():
        real_flush()
        told.append((capfd.readouterr().out, script.opened))

    monkeypatch.setattr(stream_text, "flush_output", flush)
    monkeypatch.setattr(demo, "flush_output", flush)
    assert run(["demo"]) == 0
    first, second = told[0], told[1]
    assert first[0].startswith(f"prompt: {demo.PROMPT}\ntp 1: text         ")
    assert FIRST_TEXT.search(first[0].encode())
    assert len(first[0].splitlines()[1]) == len("tp 1: text         ") + 1
    assert not FIRST_TEXT.search(first[0][:-1].encode())
    assert (len(second[0]), second[1]) == (1, 1)
    of_first, of_second = ("".join(out for out, opened in told if opened == number) for number in (1, 2))
    assert of_first.count("\n") == 3
    assert of_second.splitlines() == [line.replace("tp 1", "tp 2") for line in of_first.splitlines()[1:]]


def test_a_demonstration_that_fails_in_its_text_ends_the_line(script, capfd):
    failed = {"finish_reason": "failed", "error": "not finite"}
    script.spoil = lambda _settings, _index, completion: fake_pool.replace(completion, **failed)
    assert run(["demo"]) == 1
    out, err = capfd.readouterr()
    assert out.count("\n") == 2
    assert out.endswith("\n")
    assert err.endswith("prompt 1: not finite\n")


def test_without_a_tokenizer_ids_are_streamed(script, capfd):
    script.spoil = lambda _settings, _index, completion: fake_pool.replace(completion, text=None)
    assert run(GENERATE) == 0
    expected = capfd.readouterr()
    assert run([*GENERATE, "--stream"]) == 0
    assert capfd.readouterr() == expected


@pytest.mark.usefixtures("script")
def test_streamed_json_is_a_line_a_piece_and_ends_with_what_json_prints(capfd):
    arguments = [*GENERATE, "--prompt-ids", "5,6", "--json"]
    assert run(arguments) == 0
    expected = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert run([*arguments, "--stream"]) == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [line["completion"] for line in lines if "completion" in line] == expected
    assert [expected[0]["prompt"], expected[1]["prompt"]] == ["Once", None]
    for index, completion in enumerate(expected):
        pieces = [line for line in lines if line["prompt_index"] == index]
        assert "".join(piece["text"] for piece in pieces) == completion["text"]
        assert [token_id for piece in pieces for token_id in piece["token_ids"]] == completion["token_ids"]


def test_a_request_that_failed_while_it_was_streamed_is_told(script, capfd):
    failed = {"finish_reason": "failed", "error": "not finite"}
    script.spoil = lambda _settings, _index, completion: fake_pool.replace(completion, **failed)
    assert run([*GENERATE, "--stream"]) == 1
    out, err = capfd.readouterr()
    assert len(out) == 5
    assert err == "leafsum: 1 of 1 prompts failed: prompt 1: not finite\n"


def test_a_terminal_gets_no_control_characters(script, capfd, monkeypatch):
    script.spoil = lambda _settings, _index, completion: fake_pool.replace(completion, token_ids=(97, 27, 10, 98))
    monkeypatch.setattr(generate, "on_terminal", lambda: True)
    assert run([*GENERATE, "--stream"]) == 0
    assert capfd.readouterr().out == "a\ufffd\nb\n"


def test_an_interrupt_between_pieces_ends_the_line(script, capfd, monkeypatch):
    pieces = iter(["a", "b"])

    def write_or_interrupt(_text):
        try:
            print(next(pieces), end="", flush=True)  # noqa: T201 (this is the output)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(stream_text, "write", write_or_interrupt)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # a second Ctrl-C would be ignored, here and in later tests
    assert run([*GENERATE, "--stream"]) == 130
    assert capfd.readouterr() == ("ab\n", "\nleafsum: interrupted\n")
    assert script.closed == 1


def test_stop_texts_reach_the_pool_as_they_are(script, capfd, monkeypatch):
    seen = []
    real_generate = fake_pool.FakePool.generate

    def note(self, prompts, sampling, *, on_progress=None):
        seen.append(sampling.stop_strings)
        return real_generate(self, prompts, sampling, on_progress=on_progress)

    monkeypatch.setattr(fake_pool.FakePool, "generate", note)
    assert run([*GENERATE, "--stop", "\n\n", "--stop", "\\n", "--stop", "a,b"]) == 0
    assert seen == [("\n\n", "\\n", "a,b")]
    assert (script.opened, capfd.readouterr().err) == (1, "")


def test_stop_texts_for_a_folder_without_a_tokenizer_are_refused_before_any_pool(script, capfd, tmp_path):
    shutil.copy(ensure_tiny() / "config.json", tmp_path)
    assert run(["generate", "--model", str(tmp_path), "--prompt-ids", "1,2", "--stop", "x"]) == 2
    assert "--stop: expected a model folder with a tokenizer.json" in capfd.readouterr().err
    assert script.opened == 0
