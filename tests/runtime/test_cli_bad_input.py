"""`leafsum generate` as a user starts it, on wrong input: exit code 2, one paragraph, and nothing left running."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from leafsum.ranks.tiny import ensure_tiny
from processes import processes_in


def refused(folder: Path, *arguments: str, prefix: tuple[str, ...] = ()) -> str:
    """The one paragraph on standard error of a command that is refused; nothing of its working folder `folder` runs."""
    (folder / "tmp").mkdir()
    words = [*prefix, sys.executable, "-m", "leafsum", "generate", *arguments]
    environ = os.environ | {"TMPDIR": str(folder / "tmp")}
    ended = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    assert ended.stderr.startswith("leafsum: ")
    assert ended.stderr.count("\n") == 1
    assert processes_in(folder) == []
    assert list((folder / "tmp").iterdir()) == []
    return ended.stderr


def with_config(model_dir: Path, **values: object) -> None:
    path = model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def with_text_config(model_dir: Path, **values: object) -> None:
    fields = json.loads((model_dir / "config.json").read_text())["text_config"]
    with_config(model_dir, text_config=fields | values)


def cut_short(model_dir: Path) -> None:
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        pytest.param(shutil.rmtree, "model: there is no folder model (looked in ", id="missing"),
        pytest.param(lambda path: (path / "config.json").unlink(), "expected config.json in ", id="no config"),
        pytest.param(
            lambda path: with_config(path, model_type="llama"),
            "model_type 'llama' is not a known family; known: qwen3_5_moe, ",
            id="family",
        ),
        pytest.param(
            lambda path: with_text_config(path, moe_intermediate_size=24),
            "768 misshapen (model.language_model.layers.0.mlp.experts.0.gate_proj.weight is (16, 128), "
            "expected (24, 128)",
            id="shape",
        ),
        pytest.param(cut_short, "model.safetensors is damaged or cut short", id="truncated"),
        pytest.param(
            lambda path: (path / "chat_template.jinja").write_bytes(b"\xff"),
            "chat_template.jinja: expected a chat template in UTF-8",
            id="template",
        ),
    ],
)
def test_a_model_folder_that_cannot_be_served(spoil: Callable[[Path], object], text, tmp_path):
    shutil.copytree(ensure_tiny(), tmp_path / "model")
    spoil(tmp_path / "model")
    assert text in refused(tmp_path, "--model", "model", "--tp", "2", "--prompt", "x")


@pytest.mark.parametrize("model", ["~nosuchuser/x", "x" * 300])
def test_a_model_name_that_cannot_be_one(model, tmp_path):
    assert f"model: cannot look for the folder {model}: " in refused(tmp_path, "--model", model, "--prompt", "x")


def test_a_cache_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    prefix = ("env", f"XDG_CACHE_HOME={tmp_path / 'file'}")
    assert "Set XDG_CACHE_HOME to a folder you can write" in refused(tmp_path, "--prompt", "x", prefix=prefix)


def test_a_prompt_file_that_is_no_text(tmp_path):
    (tmp_path / "prompt.txt").write_bytes(b"caf\xe9")
    assert "prompt file prompt.txt: expected UTF-8, found byte 0xe9 at byte offset 3" in refused(
        tmp_path, "--prompt-file", "prompt.txt"
    )


def test_a_standard_input_that_is_closed(tmp_path):
    prefix = ("sh", "-c", 'exec "$0" "$@" <&-')
    assert "standard input: expected a prompt, but it was closed" in refused(
        tmp_path, "--prompt-file", "-", prefix=prefix
    )


def test_a_chat_template_that_breaks(tmp_path):
    shutil.copytree(ensure_tiny(), tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ 1 // 0 }}")
    assert "chat template failed: integer division or modulo by zero" in refused(
        tmp_path, "--model", "model", "--chat", "--prompt", "x"
    )
