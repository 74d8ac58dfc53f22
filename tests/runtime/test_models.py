"""What --model may say."""

import sys
import types
from pathlib import Path

import pytest
from leafsum.errors import ModelError
from leafsum.runtime.models import HUB_FILES, resolve_model


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
    ],
)
def test_what_is_not_there_is_named(text, expected):
    with pytest.raises(ModelError, match=expected):
        resolve_model(text)
