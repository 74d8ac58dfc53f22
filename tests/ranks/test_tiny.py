"""The demonstration model: the same bytes on every machine, a whole model folder, safe to make twice at once."""

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from leafsum.collectives.hazards import HazardCounts
from leafsum.collectives.testing import run_ranks
from leafsum.collectives.transport import Transport
from leafsum.errors import ConfigError
from leafsum.ranks import tiny
from leafsum.ranks.checkpoint import Checkpoint
from leafsum.ranks.configs.load import load_spec
from leafsum.ranks.context import RankContext
from leafsum.ranks.models import build_model
from leafsum.ranks.sizes import expected_tensors
from leafsum.runtime.receipts.prompts import BUILT_IN_PROMPTS
from model_runs import run_single, run_steps, whole
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

WEIGHTS_SHA256 = "68c6e31d08be845ffde40e7ae48938c2c26d4f829bb914f94222fc6882ebd14d"
"""Of version 3. Another digest here is another VERSION there: golden hashes of texts hang on it."""


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny.ensure_tiny()


def test_the_weights_are_these_bytes(folder: Path) -> None:
    assert tiny.VERSION == 3
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == WEIGHTS_SHA256


def test_it_is_a_whole_small_model(folder: Path) -> None:
    spec = load_spec(folder)
    checkpoint = Checkpoint.open(folder)
    checkpoint.check(expected_tensors(spec, checkpoint.entries))
    assert (spec.family, spec.num_experts, spec.top_k, spec.eos_ids) == ("qwen4_exp", 64, 8, (256, 258))
    assert (spec.num_attention_leaves, len(spec.expert_layers), spec.max_context) == (8, 4, 32768)
    assert spec.ngram is not None
    assert (spec.ngram.layers, spec.ngram.end_id) == ((1,), 256)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 5_000_000


Edit = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]
"""Changes the text model's fields, and tensors by the names that they have below model.language_model."""

PASSAGE = tiny.TEXT[:150].encode()
"""More than two borders of DeltaNet's state, and several times the indexer's budget."""


def zero(part: str) -> Edit:
    def edit(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        found = [tensor for name, tensor in tensors.items() if re.search(part, name)]
        assert found, f"no tensor is named {part}"
        for tensor in found:
            tensor.zero_()

    return edit


def forget(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Decays of e^-700 a token and less."""
    for name, tensor in tensors.items():
        if name.endswith(("A_log", "dt_bias")):
            tensor.fill_(5.0)


def see_one_token(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if name.endswith("linear_attn.conv1d.weight"):
            tensor[..., :-1] = 0


def see_all_keys(text_config: dict[str, Any], _: dict[str, torch.Tensor]) -> None:
    text_config["indexer_budget"] = 4096


WITHOUT: dict[str, Edit] = {
    "DeltaNet": zero(r"linear_attn\.out_proj"),
    "the state": forget,
    "the convolution": see_one_token,
    "attention": zero(r"self_attn\.o_proj"),
    "the indexer's choice": see_all_keys,
    "n-grams": zero(r"ple\.value_proj"),
    "injection weights": zero(r"block_inject_weight"),
    "mixers": zero(r"input_mix_weight_up"),
    "routed experts": zero(r"mlp\.experts\.\d+\.down_proj"),
    "the shared expert": zero(r"mlp\.shared_expert\.down_proj"),
}


def edited(model: Path, folder: Path, edit: Edit) -> Path:
    config = json.loads((model / "config.json").read_text())
    tensors = load_file(model / "model.safetensors")
    edit(config["text_config"], tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def next_tokens(folder: Path, tokens: bytes) -> NDArray[np.int64]:
    """The most likely next token behind each of these."""
    found: NDArray[np.int64] = run_single(folder, [tokens], whole([tokens]), "bfloat16").logits.argmax(axis=1)
    return found


@pytest.fixture(scope="module")
def written(folder: Path) -> NDArray[np.int64]:
    return next_tokens(folder, PASSAGE)


@pytest.mark.parametrize("part", WITHOUT)
def test_every_part_changes_what_is_written(
    part: str, folder: Path, written: NDArray[np.int64], tmp_path: Path
) -> None:
    without = next_tokens(edited(folder, tmp_path, WITHOUT[part]), PASSAGE)
    assert np.count_nonzero(without != written) > len(PASSAGE) / 6


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_built_in_prompt_meets_every_hazard(num_ranks: int, folder: Path) -> None:
    """While it is read, before a single token is generated."""

    def counts_by_prompt(transport: Transport) -> list[dict[str, int]]:
        hazards = HazardCounts()
        context = RankContext(transport.rank, num_ranks, "bfloat16", "auto", "contiguous", transport, hazards=hazards)
        model = build_model(load_spec(folder), Checkpoint.open(folder), context)
        met = []
        for prompt in BUILT_IN_PROMPTS:
            before = asdict(hazards)
            run_steps(model, [prompt.encode()], whole([prompt.encode()]))
            met.append({name: count - before[name] for name, count in asdict(hazards).items()})
        return met

    for prompt, *of_ranks in zip(BUILT_IN_PROMPTS, *run_ranks(num_ranks, counts_by_prompt), strict=True):
        assert all(min(counts.values()) > 0 for counts in of_ranks), (prompt, of_ranks)


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
    assert folder == tmp_path / "leafsum" / "tiny-3"
    assert [entry.name for entry in folder.parent.iterdir()] == ["tiny-3"]
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
    assert folders == {str(tmp_path / "leafsum" / "tiny-3")}
    assert all(maker.returncode == 0 for maker in makers)
    assert [entry.name for entry in (tmp_path / "leafsum").iterdir()] == ["tiny-3"]


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
    for name, age_s in (("tiny-1-old", 7200), ("tiny-0-old", 7200), ("tiny-3-young", 5), ("other-1-old", 7200)):
        (cache / name).mkdir()
        (cache / name / "config.json").write_text("{}")
        os.utime(cache / name, (time.time() - age_s,) * 2)
    assert tiny.ensure_tiny() == cache / "tiny-3"
    assert sorted(entry.name for entry in cache.iterdir()) == ["other-1-old", "tiny-3", "tiny-3-young"]
