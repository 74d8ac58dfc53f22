"""Prompts of the command line: every source, and every way that one can be wrong."""

import io
import sys

import pytest
from leafsum.errors import PromptError
from leafsum.runtime.commands.prompts import gather_prompts, parse_ids


def texts_of(prompts):
    return [prompt.text for prompt in prompts]


def test_order_is_texts_then_files_then_ids(tmp_path):
    (tmp_path / "f").write_text("from file\n")
    prompts = gather_prompts(["b", "a"], [str(tmp_path / "f")], ["3,4"])
    assert texts_of(prompts) == ["b", "a", "from file\n", None]
    assert prompts[-1].token_ids == (3, 4)


def test_lines_end_at_newlines_only(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes("one\r\ntwo\u2028still two\x0bstill\nthree".encode())
    assert texts_of(gather_prompts([], [str(path)], [], one_per_line=True)) == [
        "one",
        "two\u2028still two\x0bstill",
        "three",
    ]


def test_standard_input_is_a_file(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("von stdin: ß".encode())))
    assert texts_of(gather_prompts([], ["-"], [])) == ["von stdin: ß"]


def test_a_closed_standard_input_is_told(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(PromptError, match="standard input: expected a prompt, but it was closed"):
        gather_prompts([], ["-"], [])


def test_broken_utf8_names_file_and_byte_offset(tmp_path):
    path = tmp_path / "latin1.txt"
    path.write_bytes("äb".encode() + b"c\xff\xfe")
    with pytest.raises(PromptError, match=r"latin1\.txt: expected UTF-8, found byte 0xff at byte offset 4"):
        gather_prompts([], [str(path)], [])


def test_broken_utf8_argument():
    with pytest.raises(PromptError, match="--prompt: expected UTF-8, found a broken sequence at character 1"):
        gather_prompts(["a\udcff"], [], [])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([], [], []), "no prompt: expected at least one --prompt TEXT, --prompt-file FILE or --prompt-ids"),
        (([""], [], []), "--prompt: the prompt is empty"),
        (([], ["/nonexistent/prompt.txt"], []), "prompt file /nonexistent/prompt.txt: cannot be read: No such file"),
        (([], ["/"], []), "prompt file /: cannot be read: Is a directory"),
        (([], [], [""]), "--prompt-ids: the prompt is empty"),
        (([], [], ["1,,2"]), "--prompt-ids: expected integers .* found '' as entry 2"),
        (([], [], ["1,x"]), "found 'x' as entry 2"),
        (([], [], ["-1"]), "found '-1' as entry 1"),
        (([], [], ["1 2"]), "found '1 2' as entry 1"),
    ],
)
def test_wrong_prompts_are_refused(arguments, text):
    with pytest.raises(PromptError, match=text):
        gather_prompts(*arguments)


def test_empty_files_and_lines_are_refused(tmp_path):
    path = tmp_path / "p"
    path.write_bytes(b"")
    with pytest.raises(PromptError, match=r"prompt file .*/p: the prompt is empty"):
        gather_prompts([], [str(path)], [])
    path.write_bytes(b"one\n\nthree\n")
    with pytest.raises(PromptError, match=r"prompt file .*/p, line 2: the prompt is empty"):
        gather_prompts([], [str(path)], [], one_per_line=True)


def test_ids_may_have_spaces():
    assert parse_ids(" 1, 2 ,3 ") == (1, 2, 3)
