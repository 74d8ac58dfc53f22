"""`leafsum inspect`: sums that must come out, what travels, and models that cannot be served."""

import json
import math
import shutil
import subprocess
import sys
import time

import pytest
from leafsum.errors import ConfigError, ModelError
from leafsum.ranks.checkpoint import Checkpoint
from leafsum.ranks.tiny import ensure_tiny
from leafsum.runtime.commands.inspect import size
from leafsum.runtime.commands.main import run
from leafsum.runtime.commands.needs import inspect_model
from leafsum.runtime.settings import Settings
from published_configs import FLASH_NEXT, write_sparse

FP32_BYTES = 4


@pytest.fixture(scope="module")
def model_dir():
    return ensure_tiny()


def test_parameters_are_those_of_the_file(model_dir):
    entries = Checkpoint.open(model_dir).entries.values()
    needs = inspect_model(model_dir, Settings())
    assert sum(needs.parameters.values()) == sum(math.prod(entry.shape) for entry in entries)
    assert needs.file_bytes == (model_dir / "model.safetensors").stat().st_size


@pytest.mark.parametrize("placement", ["contiguous", "strided", "random:3"])
@pytest.mark.parametrize("tp", [2, 3, 8])
def test_ranks_together_hold_every_placed_part_once(tp, placement, model_dir):
    alone = inspect_model(model_dir, Settings()).ranks[0]
    ranks = inspect_model(model_dir, Settings(tp=tp, placement=placement)).ranks
    assert sum(rank.num_experts for rank in ranks) == alone.num_experts
    assert sum(rank.num_heads for rank in ranks) == alone.num_heads
    for part in ("experts", "head"):
        assert sum(rank.weight_bytes[part] for rank in ranks) == alone.weight_bytes[part]
    assert {rank.weight_bytes["router"] for rank in ranks} == {alone.weight_bytes["router"]}
    assert all(rank.kv_bytes == rank.kv_bytes_per_token * 32768 for rank in ranks)


def test_what_travels_is_what_an_exchange_would_count(model_dir):
    needs = inspect_model(model_dir, Settings(tp=2))
    spec = needs.spec
    # a power of two of leaves at tp 2: one row a rank, for experts and for heads of both kinds
    assert needs.exchanges["nodes"].rows == {"experts": 1, "attention": 1, "deltanet": 1}
    assert needs.exchanges["slots"].rows["experts"] == spec.top_k + 1  # and the shared one
    assert needs.exchanges["nodes"].bytes_sent_per_token == 2 * spec.num_layers * spec.hidden_size * FP32_BYTES
    assert needs.exchanges["auto"].modes == dict.fromkeys(("experts", "attention", "deltanet"), "nodes")


def test_auto_takes_the_fewer_rows(model_dir):
    needs = inspect_model(model_dir, Settings(tp=4, placement="strided"))
    rows = {mode: cost.rows["experts"] for mode, cost in needs.exchanges.items()}
    chosen = "nodes" if rows["nodes"] <= rows["slots"] else "slots"
    assert (needs.exchanges["auto"].modes["experts"], rows["auto"]) == (chosen, rows[chosen])
    assert rows["nodes"] >= rows["slots"]  # strided shares every leaf: nothing is a whole subtree


def test_one_rank_sends_nothing(model_dir):
    assert {cost.bytes_sent_per_token for cost in inspect_model(model_dir, Settings()).exchanges.values()} == {0}


def test_more_ranks_than_experts_are_refused(model_dir):
    with pytest.raises(ConfigError, match="64, the number of experts"):
        inspect_model(model_dir, Settings(tp=65))


def test_a_truncated_file_is_refused(model_dir, tmp_path, capfd):
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or cut short"):
        inspect_model(folder, Settings())
    assert run(["inspect", "--model", str(folder)]) == 2
    assert "model.safetensors is damaged or cut short" in capfd.readouterr().err


def test_report_and_json_say_the_same(capfd):
    assert run(["inspect", "--model", "tiny", "--tp", "2", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["parameters"]["total"] == sum(count for part, count in found["parameters"].items() if part != "total")
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert run(["inspect", "--model", "tiny", "--tp", "2"]) == 0
    report = capfd.readouterr().out
    assert f"parameters: {found['parameters']['total']:,}" in report
    assert f"{found['exchanges']['nodes']['bytes_sent_per_token']:,} bytes a token" in report
    assert " row(s) a layer to each peer) as nodes" in report
    assert run(["inspect", "--model", "tiny"]) == 0
    assert "one rank: nothing travels" in capfd.readouterr().out


@pytest.fixture(scope="module")
def flash_next(tmp_path_factory):
    return write_sparse(tmp_path_factory.mktemp("flash"), FLASH_NEXT, num_files=4)


def test_a_folder_of_hundreds_of_gigabytes(flash_next, capfd):
    started = time.process_time()
    assert run(["inspect", "--model", str(flash_next), "--tp", "2", "--json"]) == 0
    assert time.process_time() - started < 20
    found = json.loads(capfd.readouterr().out)
    assert (found["supported"], found["family"], found["parameters"]["total"]) == (True, "qwen4_exp", 176_943_899_520)
    assert {kind: len(layers) for kind, layers in found["layers"].items()} == {
        "sparse_attention": 12,
        "deltanet": 36,
        "ngram": 1,
        "experts": 48,
        "dense": 0,
    }
    assert set(found["ignored"]) == {"model.visual.", "mtp."}
    assert found["mapped_bytes"] == 320_001_536 * 160 * 2
    assert [rank["has_shared_expert"] for rank in found["ranks"]] == [False, True]
    for rank in found["ranks"]:
        assert rank["state_bytes"] == 16 * sum(rank["state_bytes_per_slot"].values())
        sums = sum(rank["weight_bytes"].values()) + rank["kv_bytes"] + rank["state_bytes"]
        assert rank["total_bytes"] == sums < found["file_bytes"] / 2
    hidden_row = 2560 * FP32_BYTES
    assert found["exchanges"]["slots"]["bytes_sent"] == {
        "experts": 48 * 11 * hidden_row,  # ten chosen and the shared one
        "attention": 12 * 4 * hidden_row,
        "deltanet": 36 * 4 * hidden_row,
    }
    assert found["exchanges"]["auto"]["bytes_sent_per_token"] == 96 * hidden_row
    assert found["replicated_bytes"]["total"] == sum(
        size for part, size in found["replicated_bytes"].items() if part != "total"
    )


def test_the_report_of_flash_next(flash_next, capfd):
    assert run(["inspect", "--model", str(flash_next), "--tp", "2", "--concurrency", "3"]) == 0
    report = capfd.readouterr().out
    for text in (
        "qwen4_exp: 48 layers: 12 sparse attention, 36 DeltaNet, 1 with an n-gram embedding, 48 with experts",
        "hidden 2560 in 4 streams, 24 heads over 2 KV heads of 256 (64 rotated), 4 index heads of 128",
        "ignored: model.visual.*, 1 tensors",
        "ignored: mtp.*, 1 tensors",
        "mapped from the files, once for all ranks: 95.4 GiB",
        "weights 118.6 GiB: ",
        "256 experts and the shared one, 12 heads over 1 KV heads, 24 DeltaNet heads",
        "in 3 slots (each: deltanet",
        "whole on every rank: 2.6 GiB (embedding, router, indexer, hyper_connections, ngram, norms)",
        "deltanet        368,640 (1 row(s) a layer to each peer) as nodes",
    ):
        assert text in report


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"quantization_config": {"quant_method": "exl3"}},
            "quantization_config = {'quant_method': 'exl3'} is not supp",
        ),
        ({"model_type": "llama"}, "model_type 'llama' is not a known family; known: qwen3_5_moe, qwen3_5_moe_text,"),
        (
            {"text_config": FLASH_NEXT["text_config"] | {"indexer_kv_heads": 2}},
            "text_config.indexer_kv_heads = 2 is not",
        ),
    ],
)
def test_why_a_model_is_refused(change, why, tmp_path, capfd):
    (tmp_path / "config.json").write_text(json.dumps(FLASH_NEXT | change))
    assert run(["inspect", "--model", str(tmp_path)]) == 2
    printed = capfd.readouterr()
    assert (printed.out, why in printed.err) == ("", True)
    assert run(["inspect", "--model", str(tmp_path), "--json"]) == 2
    printed = capfd.readouterr()
    found = json.loads(printed.out)
    assert (found["supported"], why in found["why"], why in printed.err) == (False, True, True)


def test_inspecting_loads_no_torch(flash_next):
    code = (
        "import sys\nfrom leafsum.runtime.commands.main import run\n"
        f"assert run(['inspect', '--model', {str(flash_next)!r}]) == 0\nassert 'torch' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, timeout=120, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_sizes_are_readable():
    assert [size(count) for count in (0, 1023, 1536, 3 << 30, 5 << 40)] == [
        "0 bytes",
        "1023 bytes",
        "1.5 KiB",
        "3.0 GiB",
        "5.0 TiB",
    ]
