"""The demonstration model: the same bytes on every machine, a whole model folder, safe to make twice at once."""

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from leafsum.errors import ConfigError
from leafsum.ranks import tiny
from leafsum.ranks.checkpoint import Checkpoint
from leafsum.ranks.configs.load import load_spec
from leafsum.ranks.sizes import expected_tensors
from tokenizers import Tokenizer

WEIGHTS_SHA256 = "51b2965e9440faf7e24ac902879757b65e6dae4061943236be15693e08867cf5"
"""Of version 2. Another digest here is another VERSION there: golden hashes of texts hang on it."""


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny.ensure_tiny()


def test_the_weights_are_these_bytes(folder: Path) -> None:
    assert tiny.VERSION == 2
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == WEIGHTS_SHA256


def test_it_is_a_whole_small_model(folder: Path) -> None:
    spec = load_spec(folder)
    checkpoint = Checkpoint.open(folder)
    checkpoint.check(expected_tensors(spec, checkpoint.entries))
    assert (spec.num_experts, spec.top_k, spec.max_context, spec.eos_ids) == (64, 8, 4096, (256, 258))
    assert (spec.num_attention_leaves, len(spec.expert_layers)) == (8, 4)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 5_000_000


def test_any_text_survives_the_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("plain", "  two  spaces\n\ttab\r\n", "ünïcode 漢字 🌲", "\x00\x7f", "it's 1,000 o'clock"):
        ids = tokenizer.encode(text).ids
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("<|im_start|>user").ids == [257, *b"user"]
    assert tokenizer.decode([*b"end", 258]) == "end"


def test_making_it_is_quick_and_leaves_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_in = []

    def write_and_note(folder: Path) -> None:
        made_in.append(folder.stat().st_ino)
        write_tiny(folder)

    write_tiny = tiny.write_tiny
    monkeypatch.setattr(tiny, "write_tiny", write_and_note)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    start_s = time.process_time()
    folder = tiny.ensure_tiny()
    assert time.process_time() - start_s < 1
    assert made_in == [folder.stat().st_ino], "expected the finished folder to be renamed, not filled in its place"
    assert folder == tmp_path / "leafsum" / "tiny-2"
    assert [entry.name for entry in folder.parent.iterdir()] == ["tiny-2"]
    before_ns = (folder / "config.json").stat().st_mtime_ns
    assert tiny.ensure_tiny() == folder
    assert (folder / "config.json").stat().st_mtime_ns == before_ns


def test_several_processes_at_once_share_one_folder(tmp_path: Path) -> None:
    code = "from leafsum.ranks.tiny import ensure_tiny; print(ensure_tiny())"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    makers = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    folders = {maker.communicate(timeout=60)[0].strip() for maker in makers}
    assert folders == {str(tmp_path / "leafsum" / "tiny-2")}
    assert all(maker.returncode == 0 for maker in makers)
    assert [entry.name for entry in (tmp_path / "leafsum").iterdir()] == ["tiny-2"]


def test_a_failed_making_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tiny, "write_tiny", fail)
    with pytest.raises(ConfigError, match="no space left"):
        tiny.ensure_tiny()
    assert list((tmp_path / "leafsum").iterdir()) == []


@pytest.mark.parametrize("place", ["file/cache", "file"])
def test_a_cache_that_cannot_be_made_names_the_variable(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / place))
    with pytest.raises(ConfigError, match=r"cannot be written: Not a directory\. Set XDG_CACHE_HOME"):
        tiny.ensure_tiny()


def test_a_user_without_a_home_is_told_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME"):
        tiny.ensure_tiny()


def test_what_killed_makers_left_is_removed_once_it_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = tiny.ensure_tiny().parent
    for name, age_s in (("tiny-1-old", 7200), ("tiny-0-old", 7200), ("tiny-2-young", 5), ("other-1-old", 7200)):
        (cache / name).mkdir()
        (cache / name / "config.json").write_text("{}")
        os.utime(cache / name, (time.time() - age_s,) * 2)
    assert tiny.ensure_tiny() == cache / "tiny-2"
    assert sorted(entry.name for entry in cache.iterdir()) == ["other-1-old", "tiny-2", "tiny-2-young"]
