"""`leafsum inspect`: sums that must come out, what travels, and models that cannot be served."""

import json
import math
import shutil

import pytest
from leafsum.errors import ConfigError, ModelError
from leafsum.ranks.checkpoint import Checkpoint
from leafsum.ranks.tiny import ensure_tiny
from leafsum.runtime.commands.inspect import size
from leafsum.runtime.commands.main import run
from leafsum.runtime.commands.needs import inspect_model
from leafsum.runtime.settings import Settings

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
    # a power of two of leaves at tp 2: one row a rank, for experts and for attention
    assert (needs.exchanges["nodes"].expert_rows, needs.exchanges["nodes"].attention_rows) == (1, 1)
    assert needs.exchanges["slots"].expert_rows == spec.top_k
    assert needs.exchanges["nodes"].bytes_sent_per_token == 2 * spec.num_layers * spec.hidden_size * FP32_BYTES
    assert needs.auto == {"experts": "nodes", "attention": "nodes"}


def test_auto_takes_the_fewer_rows(model_dir):
    needs = inspect_model(model_dir, Settings(tp=4, placement="strided"))
    rows = {mode: cost.expert_rows for mode, cost in needs.exchanges.items()}
    assert needs.auto["experts"] == ("nodes" if rows["nodes"] <= rows["slots"] else "slots")
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
    assert "auto takes nodes for experts" in report
    assert run(["inspect", "--model", "tiny"]) == 0
    assert "one rank: nothing travels" in capfd.readouterr().out


def test_sizes_are_readable():
    assert [size(count) for count in (0, 1023, 1536, 3 << 30, 5 << 40)] == [
        "0 bytes",
        "1023 bytes",
        "1.5 KiB",
        "3.0 GiB",
        "5.0 TiB",
    ]
