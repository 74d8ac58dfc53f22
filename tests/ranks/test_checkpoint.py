"""Headers of safetensors files: what is missing, extra, misshapen or damaged is named in one error."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from leafsum.errors import ModelError
from leafsum.ranks.checkpoint import Checkpoint, Ignored
from leafsum.ranks.configs.load import load_spec
from leafsum.ranks.sizes import expected_tensors, ignored_prefixes
from published_configs import FLASH_NEXT, write_sparse
from safetensors import safe_open
from tiny_checkpoints import Tensors, config_with, random_tensors, save_tensors, with_fused_experts, write_checkpoint


def checked(folder: Path) -> Checkpoint:
    checkpoint = Checkpoint.open(folder)
    checkpoint.check(expected_tensors(load_spec(folder), checkpoint.entries))
    return checkpoint


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize(
    "changes", [{}, {"mlp_only_layers": [1], "attention_bias": True}, {"tie_word_embeddings": True}]
)
def test_every_published_layout_is_whole(tmp_path: Path, fused: bool, num_shards: int, changes: dict) -> None:
    folder = write_checkpoint(tmp_path, fused=fused, num_shards=num_shards, **changes)
    checkpoint = checked(folder)
    written = random_tensors(config_with(**changes), 0)
    assert set(checkpoint.entries) == set(with_fused_experts(written) if fused else written)
    assert len(checkpoint.files) == num_shards
    entry = checkpoint.entries["model.embed_tokens.weight"]
    assert (entry.dtype, entry.shape) == ("BF16", (101, 48))


def test_what_transformers_writes(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    changes = {"attention_bias": True, "mlp_only_layers": [0], "eos_token_id": [1, 2], "num_hidden_layers": 3}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**config_with(**changes))).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert "num_local_experts" in json.loads((tmp_path / "config.json").read_text())
    assert len(checked(tmp_path).files) > 1
    spec = load_spec(tmp_path)
    assert (spec.num_experts, spec.eos_ids, spec.dense_layers) == (20, (1, 2), (0,))


def test_harmless_extras(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = torch.ones(101, 48)

    checked(write_checkpoint(tmp_path, tie_word_embeddings=True, edit=add))


def test_all_faults_come_in_one_error(tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        del tensors["lm_head.weight"]
        for expert in range(6):
            del tensors[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"]
        tensors["model.norm.weight"] = torch.ones(49)
        tensors["model.layers.2.mlp.gate.weight"] = torch.ones(20, 48)

    with pytest.raises(ModelError) as caught:
        checked(write_checkpoint(tmp_path, edit=spoil))
    text = str(caught.value)
    assert "7 missing (lm_head.weight (101, 48)," in text
    assert "and 3 more)" in text
    assert "1 not part of this family (model.layers.2.mlp.gate.weight)" in text
    assert "1 misshapen (model.norm.weight is (49,), expected (48,))" in text


def test_a_type_that_is_not_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    tensors = random_tensors(config_with(), 0)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float64)
    save_tensors(tmp_path, tensors)
    with pytest.raises(ModelError, match=r"1 of a type not read \(model\.norm\.weight is F64\)"):
        checked(tmp_path)


@pytest.mark.parametrize("kept_bytes", [0, 5, 300, -1])
def test_a_truncated_file_is_named(tmp_path: Path, kept_bytes: int) -> None:
    file = write_checkpoint(tmp_path, num_shards=2) / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:kept_bytes])
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is damaged or cut short"):
        Checkpoint.open(tmp_path)


def test_a_header_of_garbage(tmp_path: Path) -> None:
    file = write_checkpoint(tmp_path) / "model.safetensors"
    file.write_bytes(b"\xff" * 4096)
    with pytest.raises(ModelError, match="damaged"):
        Checkpoint.open(tmp_path)


def test_folders_without_safetensors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"expected model\.safetensors or .* found no weights"):
        Checkpoint.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"found only pytorch_model\.bin, which unpickling would have to execute"):
        Checkpoint.open(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (write_checkpoint(tmp_path, num_shards=3) / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"1 of its files missing \(model-00002-of-00003\.safetensors\)"):
        Checkpoint.open(tmp_path)


def test_an_index_that_does_not_fit_its_files(tmp_path: Path) -> None:
    index = write_checkpoint(tmp_path, num_shards=2) / "model.safetensors.index.json"
    right = json.loads(index.read_text())
    wrong = dict.fromkeys(right["weight_map"], "model-00001-of-00002.safetensors")
    index.write_text(json.dumps({"weight_map": wrong | {"lm_head.weight": "model-00002-of-00002.safetensors"}}))
    with pytest.raises(ModelError, match=r"places tensor .* in model-0000\d-of-00002\.safetensors, which lacks it"):
        Checkpoint.open(tmp_path)
    for bad in ({}, {"weight_map": {}}, {"weight_map": {"a": 1}}):
        index.write_text(json.dumps(bad))
        with pytest.raises(ModelError, match="weight_map"):
            Checkpoint.open(tmp_path)


@pytest.mark.parametrize("shard", ["", ".", "..", "../x", "/etc/hostname", "a/b", "a\\\\b", "a\0b", "x" * 300])
def test_a_shard_is_a_file_of_the_folder(tmp_path: Path, shard: str) -> None:
    index = write_checkpoint(tmp_path, num_shards=2) / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"t": shard}}))
    with pytest.raises(ModelError, match="weight_map: expected the name of a file in this folder for tensor 't'"):
        Checkpoint.open(tmp_path)


def make_folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize(("make", "kind"), [(os.mkfifo, "something else"), (make_folder, "a folder")])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
)
def test_what_is_no_regular_file_is_named(tmp_path: Path, name: str, make: Callable[[Path], None], kind: str) -> None:
    write_checkpoint(tmp_path, num_shards=1 if name == "model.safetensors" else 2)
    (tmp_path / name).unlink()
    make(tmp_path / name)
    with pytest.raises(ModelError, match=f"expected a regular file at .*{name}, found {kind}"):
        Checkpoint.open(tmp_path)


def test_a_stale_single_file_beside_an_index(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, num_shards=2)
    write_checkpoint(tmp_path)
    with pytest.raises(ModelError, match="an index that does not name it"):
        Checkpoint.open(tmp_path)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, num_shards=2)
    whole = write_checkpoint(tmp_path / "whole") / "model.safetensors"
    shutil.move(whole, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(ModelError, match="lies in both"):
        Checkpoint.open(tmp_path)


def test_the_digest_names_config_headers_and_sizes(tmp_path: Path) -> None:
    def rename(tensors: Tensors) -> None:
        tensors["model.nrom.weight"] = tensors.pop("model.norm.weight")

    digests = {
        Checkpoint.open(write_checkpoint(tmp_path / "a")).digest,
        Checkpoint.open(write_checkpoint(tmp_path / "b", rms_norm_eps=1e-5)).digest,
        Checkpoint.open(write_checkpoint(tmp_path / "c", dtype="float16")).digest,
        Checkpoint.open(write_checkpoint(tmp_path / "d", num_shards=2)).digest,
        Checkpoint.open(write_checkpoint(tmp_path / "f", edit=rename)).digest,
    }
    assert len(digests) == 5
    assert Checkpoint.open(write_checkpoint(tmp_path / "e", seed=9)).digest in digests
    assert all(len(digest) == 64 for digest in digests)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_an_entry_says_where_its_bytes_are(tmp_path: Path, num_shards: int) -> None:
    """For tables that are mapped into memory instead of being read."""
    folder = write_checkpoint(tmp_path, num_shards=num_shards)
    for name, entry in Checkpoint.open(folder).entries.items():
        content = entry.file.read_bytes()[entry.offset : entry.offset + entry.num_bytes]
        stored = torch.frombuffer(bytearray(content), dtype=torch.bfloat16).view(entry.shape)
        with safe_open(entry.file, framework="pt") as tensors:
            assert torch.equal(stored, tensors.get_tensor(name))


def test_what_is_ignored_is_counted(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors |= {"mtp.fc.weight": torch.ones(3, 5), "mtp.norm.weight": torch.ones(7)}

    folder = write_checkpoint(tmp_path, edit=add)
    checkpoint = Checkpoint.open(folder)
    expected = expected_tensors(load_spec(folder), checkpoint.entries)
    checkpoint.check(expected, ("mtp.", "model.visual."))
    assert checkpoint.ignored(("mtp.", "model.visual.")) == {"mtp.": Ignored(num_tensors=2, num_bytes=44)}
    with pytest.raises(ModelError, match=r"2 not part of this family \(mtp\.fc\.weight, mtp\.norm\.weight\)"):
        checkpoint.check(expected)


def test_headers_of_hundreds_of_gigabytes_are_read_at_once(tmp_path: Path) -> None:
    """The files are as long as the published ones, and hollow."""
    folder = write_sparse(tmp_path, FLASH_NEXT, num_files=8)
    started = time.process_time()
    spec, checkpoint = load_spec(folder), Checkpoint.open(folder)
    checkpoint.check(expected_tensors(spec, checkpoint.entries), ignored_prefixes(spec))
    assert time.process_time() - started < 10
    assert sum(file.stat().st_size for file in checkpoint.files) > 350e9
    assert sum(file.stat().st_blocks * 512 for file in checkpoint.files) < 100e6
    for file in checkpoint.files:
        ends = [entry.offset + entry.num_bytes for entry in checkpoint.entries.values() if entry.file == file]
        assert max(ends) == file.stat().st_size
    assert set(checkpoint.ignored(ignored_prefixes(spec))) == {"model.visual.", "mtp."}
