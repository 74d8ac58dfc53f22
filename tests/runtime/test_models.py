"""What --model may say."""

import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest
from leafsum.errors import ModelError
from leafsum.runtime.models import HUB_FILES, model_name, resolve_model


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The hub's client, replaced: what it was asked for, and a folder or an error as its answer."""
    asked = []

    def snapshot_download(hub_id, *, allow_patterns):
        asked.append((hub_id, allow_patterns))
        if hub_id == "owner/gone":
            raise OSError("404: no such repository\nmore text")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return asked


def test_a_folder_is_taken_as_it_is(tmp_path, monkeypatch, hub):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/name") == tmp_path / "owner" / "name"
    assert hub == []


def test_tiny_is_the_built_in_model(monkeypatch):
    module = types.ModuleType("leafsum.ranks.tiny")
    module.ensure_tiny = lambda: Path("/somewhere/tiny")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "leafsum.ranks.tiny", module)
    assert resolve_model("tiny") == Path("/somewhere/tiny")


def test_a_hub_id_is_fetched_without_pickles(tmp_path, hub):
    assert resolve_model("owner/name") == tmp_path
    assert hub == [("owner/name", list(HUB_FILES))]
    assert not any(pattern.endswith((".bin", ".pt", ".py", "*")) for pattern in HUB_FILES)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("./nothing", "there is no folder nothing"),
        ("/nothing/here", "there is no folder /nothing/here .* expected a folder with config.json"),
        ("nothing", "a hub id such as owner/name"),
        (
            "owner/gone",
            r"there is no folder owner/gone .* fetching the hub id owner/gone failed: 404: no such repository$",
        ),
        (__file__, "expected a folder, found the file"),
        (
            "~nosuchuser/x",
            "cannot look for the folder ~nosuchuser/x: Could not determine home .*; expected a folder",
        ),
        ("x" * 300, "cannot look for the folder xxx.*: File name too long; expected a folder with config.json"),
        (f"{__file__}/x", "there is no folder"),
    ],
)
def test_what_is_not_there_is_named(text, expected):
    with pytest.raises(ModelError, match=expected):
        resolve_model(text)


LOOK = """
import os, sys, leafsum.runtime.models as models
if os.getuid() == 0: os.setresuid(65534, 65534, 65534)  # to root every folder is open
try: models.resolve_model(sys.argv[1])
except models.ModelError as error: print(error)
"""


@pytest.mark.parametrize("locked", ["a/model", "a"])
def test_a_folder_that_may_not_be_entered_is_named(locked):
    with tempfile.TemporaryDirectory() as base:
        model_dir = Path(base, "a", "model")
        model_dir.mkdir(parents=True)
        Path(base).chmod(0o755)
        Path(base, locked).chmod(0)
        done = subprocess.run(
            [sys.executable, "-c", LOOK, str(model_dir)], capture_output=True, text=True, check=True, cwd="/"
        )
        Path(base, locked).chmod(0o700)
    assert re.match("model: cannot look for the folder .*/model: Permission denied; expected a folder", done.stdout)


def test_a_name_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "sur\udcff" / "model").mkdir(parents=True)
    for folder in (tmp_path / "sur\udcff", tmp_path / "sur\udcff" / "model"):
        with pytest.raises(ModelError, match=r"expected a folder with a name in UTF-8, got .*udcff.*; rename it"):
            resolve_model(str(folder))


def test_a_receipt_calls_a_folder_by_its_name_alone(tmp_path, monkeypatch, hub):
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a")
    for text in ("../a/b", "b", str(tmp_path / "a" / "b"), "./b/", "../a/../a/b"):
        assert model_name(text, resolve_model(text)) == "b"
    assert model_name("..", resolve_model("..")) == tmp_path.name
    assert model_name("owner/name", resolve_model("owner/name")) == "owner/name"
    assert model_name("tiny", tmp_path / "tiny-1") == "tiny"
    assert [hub_id for hub_id, _ in hub] == ["owner/name"]
