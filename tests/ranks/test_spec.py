"""config.json and generation_config.json become a ModelSpec, or one ModelError that names what is wrong."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from leafsum.collectives.placement import Placement
from leafsum.collectives.tree import CanonicalTree
from leafsum.errors import ConfigError, ModelError
from leafsum.ranks.configs.load import load_spec
from leafsum.ranks.footprint import kv_bytes_per_token, parameter_counts, rank_bytes
from leafsum.ranks.sizes import expected_tensors
from leafsum.ranks.spec import ModelSpec, check_num_ranks
from tiny_checkpoints import config_with


def spec_of(folder: Path, generation: dict | None = None, **changes) -> ModelSpec:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_with(**changes)))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_spec(folder)


def test_published_fields(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    assert (spec.family, spec.vocab_size, spec.hidden_size, spec.num_layers) == ("qwen3_moe", 101, 48, 2)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (8, 2, 16)
    assert (spec.num_experts, spec.top_k, spec.expert_width, spec.renormalise) == (20, 4, 24, True)
    assert (spec.max_context, spec.eos_ids, spec.dense_layers, spec.dense_width) == (512, (1,), (), 0)
    assert (spec.rope.kind, spec.rope.theta) == ("default", 10000.0)


def test_experts_under_either_name(tmp_path: Path) -> None:
    assert spec_of(tmp_path, num_experts=..., num_local_experts=12).num_experts == 12
    assert spec_of(tmp_path, num_experts=12, num_local_experts=12).num_experts == 12
    with pytest.raises(ModelError, match=r"num_local_experts: expected num_experts = 11, got 12"):
        spec_of(tmp_path, num_experts=11, num_local_experts=12)
    with pytest.raises(ModelError, match="num_experts: expected an integer of at least 1 and at most 65,536, it is"):
        spec_of(tmp_path, num_experts=...)


@pytest.mark.parametrize("head_dim", [..., None])
def test_head_width_is_derived(tmp_path: Path, head_dim: object) -> None:
    assert spec_of(tmp_path, head_dim=head_dim, hidden_size=96).head_dim == 12


def test_dense_layers(tmp_path: Path) -> None:
    assert spec_of(tmp_path, num_hidden_layers=5, mlp_only_layers=[1, 9]).dense_layers == (1,)
    assert spec_of(tmp_path, num_hidden_layers=5, decoder_sparse_step=2).dense_layers == (0, 2, 4)
    spec = spec_of(tmp_path, num_hidden_layers=6, decoder_sparse_step=3, mlp_only_layers=[2])
    assert spec.dense_layers == (0, 1, 2, 3, 4)
    assert spec.expert_layers == (5,)
    assert spec.dense_width == 40


@pytest.mark.parametrize(
    ("generation", "in_config", "expected"),
    [
        ({"eos_token_id": [5, 6, 7]}, 1, (5, 6, 7)),
        ({"eos_token_id": 9}, 1, (9,)),
        ({}, [3, 4], (3, 4)),
        ({"eos_token_id": None}, 2, (2,)),
        (None, ..., ()),
    ],
)
def test_every_eos_id(tmp_path: Path, generation: dict | None, in_config: object, expected: tuple[int, ...]) -> None:
    assert spec_of(tmp_path, generation, eos_token_id=in_config).eos_ids == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}, "rope_theta": ...},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 5e5},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4}, "rope_parameters": {}, "rope_theta": 5e5},
    ],
)
def test_rope_of_both_versions(tmp_path: Path, changes: dict) -> None:
    rope = spec_of(tmp_path, **changes).rope
    assert (rope.kind, rope.theta, rope.factor, rope.original_max_positions) == ("yarn", 5e5, 4.0, 512)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; supported: silu"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8}},
            r"rope_scaling\.rope_type = 'llama3' is not supported",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 8}}, r"rope_scaling\.type = 'dynamic'"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [1]}}, r"rope_parameters\.mrope_section"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"rope_parameters\.partial_rotary_factor = 0\.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"rope_scaling": {"type": "linear"}},
            r"rope_scaling\.factor: expected a number above zero and .*, it is not there",
        ),
        ({"model_type": "llama"}, "model_type 'llama' is not a known family; known: qwen3_5_moe, .*, qwen3_moe"),
        ({"model_type": ...}, "model_type: expected a string, it is not there"),
        ({"hidden_size": "48"}, "hidden_size: expected an integer of at least 1 and at most 16,777,216, got '48'"),
        ({"hidden_size": True}, "hidden_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of num_attention_heads = 8, got 3"),
        ({"num_experts_per_tok": 21}, "num_experts_per_tok: expected at most the number of experts, 20, got 21"),
        ({"head_dim": 15}, "head_dim: expected an even number"),
        ({"eos_token_id": "x"}, "eos_token_id: expected an integer or a list of integers"),
        ({"eos_token_id": [-1]}, "eos_token_id"),
        ({"rope_theta": 1}, "rope_theta: expected a number above one"),
    ],
)
def test_what_is_refused_is_named(tmp_path: Path, changes: dict, named: str) -> None:
    with pytest.raises(ModelError, match=named) as caught:
        spec_of(tmp_path, **changes)
    assert "config.json" in str(caught.value)


EXPERTS_NAMED = "num_hidden_layers: expected at most 262,144 experts in all, so 4 layers with 65,536 experts, got 5"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 10**8}, "num_hidden_layers: expected .* at most 10,000, got 100000000"),
        ({"num_experts": 10**9}, "num_experts: expected .* at most 65,536, got 1000000000"),
        ({"num_experts": 65536, "num_hidden_layers": 5}, EXPERTS_NAMED),
        ({"num_attention_heads": 2**17}, "num_attention_heads: expected .* at most 65,536, got 131072"),
        ({"hidden_size": 2**24 + 1}, "hidden_size: expected .* at most 16,777,216, got 16777217"),
        ({"vocab_size": 2**25}, "vocab_size: expected .* at most 16,777,216, got 33554432"),
        ({"head_dim": ..., "hidden_size": 2**24, "num_attention_heads": 2}, "head_dim: expected .* at most 65,536"),
        ({"max_position_embeddings": 1e30}, r"max_position_embeddings: expected an integer .* got 1e\+30"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings: .* at most 536,870,912, got 2147483648"),
        ({"max_position_embeddings": 10**4000}, r"max_position_embeddings: expected .*, got 1000\d*\.\.\.\d*$"),
        ({"eos_token_id": [1, 101]}, r"eos_token_id: expected ids below vocab_size = 101, got \[1, 101\]"),
        ({"rms_norm_eps": 10**400}, r"rms_norm_eps: expected a number above zero and below 1 in FP32, got 1000"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps: expected a number above zero and below 1 in FP32, got inf"),
        ({"rms_norm_eps": 1e300}, r"rms_norm_eps: expected .* got 1e\+300"),
        ({"rms_norm_eps": 1e-300}, "rms_norm_eps: expected .* got 1e-300"),
        ({"rms_norm_eps": 1 - 1e-12}, r"rms_norm_eps: expected .* got 0\.999999999999"),
        ({"rope_theta": 10**400}, "rope_theta: expected a number above zero and finite in FP32, got 1000"),
        ({"rope_theta": 1e39}, r"rope_theta: expected a number above zero and finite in FP32, got 1e\+39"),
        ({"rope_scaling": {"type": "linear", "factor": 1e-20}}, "factor: expected a number of at least 5.4e-20, got"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 1e38, "mscale": 1e38, "mscale_all_dim": 1e-30}},
            "mscale: expected an attention factor that is finite in FP32",
        ),
    ],
)
def test_numbers_beyond_what_can_be_served(tmp_path: Path, changes: dict, named: str) -> None:
    with pytest.raises(ModelError, match=named) as caught:
        spec_of(tmp_path, **changes)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


def test_the_largest_sizes_are_read_at_once(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, num_hidden_layers=10_000, decoder_sparse_step=10_000, max_position_embeddings=2**29)
    assert (len(spec.dense_layers), spec.expert_layers, spec.max_context) == (9_999, (9_999,), 2**29)
    assert len(expected_tensors(spec, {})) == 10_000 * 8 + 9_999 * 3 + 1 + 20 * 3 + 3


def test_ids_of_the_generation_config_are_checked_as_well(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json: field eos_token_id: expected ids below"):
        spec_of(tmp_path, {"eos_token_id": 101})


def test_an_integer_too_long_for_python_is_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 1' + "0" * 10_000 + "}")
    with pytest.raises(ModelError, match=r"config\.json"):
        load_spec(tmp_path)


def test_a_generation_config_that_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "generation_config.json")
    with pytest.raises(ModelError, match=r"expected a regular file at .*generation_config\.json, found something else"):
        spec_of(tmp_path)


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="expected a model folder, found nothing at"):
        load_spec(tmp_path / "missing")
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="expected a model folder, found a file at"):
        load_spec(tmp_path / "file")
    with pytest.raises(ModelError, match=r"expected config\.json in"):
        load_spec(tmp_path)
    for text in ("{", "[]", "\x00", '"' + "x" * 10):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"config\.json"):
            load_spec(tmp_path)


@pytest.mark.parametrize(("num_heads", "num_leaves"), [(1, 1), (3, 1), (6, 2), (12, 4), (8, 8), (64, 8), (40, 8)])
def test_attention_leaves(tmp_path: Path, num_heads: int, num_leaves: int) -> None:
    spec = spec_of(tmp_path, num_attention_heads=num_heads, num_key_value_heads=1)
    assert spec.num_attention_leaves == num_leaves


@pytest.mark.parametrize("num_ranks", range(1, 10))
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 2), (12, 3), (6, 6), (32, 4), (3, 1)])
def test_heads_follow_the_placement_of_leaves(
    tmp_path: Path, num_ranks: int, num_heads: int, num_kv_heads: int
) -> None:
    spec = spec_of(tmp_path, num_attention_heads=num_heads, num_key_value_heads=num_kv_heads)
    tree = CanonicalTree(spec.num_attention_leaves, ids_per_leaf=1)
    placement = Placement.contiguous(tree, num_ranks)
    all_heads = []
    for rank in range(num_ranks):
        heads = spec.heads(rank, num_ranks)
        heads_per_leaf = num_heads // tree.num_leaves
        assert sorted({head // heads_per_leaf for head in heads}) == list(placement.ids_of(rank))
        assert spec.kv_heads(rank, num_ranks) == tuple(sorted({head * num_kv_heads // num_heads for head in heads}))
        assert len(heads) == heads_per_leaf * len(placement.ids_of(rank))
        all_heads.extend(heads)
    assert all_heads == list(range(num_heads))


@pytest.mark.parametrize("vocab_size", [1, 63, 64, 101, 151936])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8, 70])
def test_vocabulary_ranges_are_whole_leaves(tmp_path: Path, vocab_size: int, num_ranks: int) -> None:
    spec = spec_of(tmp_path, vocab_size=vocab_size, eos_token_id=0)
    borders = {leaf * vocab_size // 64 for leaf in range(65)}
    ranges = [spec.vocab_range(rank, num_ranks) for rank in range(num_ranks)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == vocab_size
    assert all(stop == first for (_, stop), (first, _) in itertools.pairwise(ranges))
    assert {border for each in ranges for border in each} <= borders


def test_more_ranks_than_experts(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    check_num_ranks(spec, 20)
    for num_ranks in (0, 21):
        with pytest.raises(ConfigError, match=rf"expected --tp from 1 to 20, .* got {num_ranks}"):
            check_num_ranks(spec, num_ranks)


def test_sizes_of_a_published_model(tmp_path: Path) -> None:
    """30.5 billion parameters, as its card says."""
    spec = spec_of(
        tmp_path, vocab_size=151936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    )  # fmt: skip
    counts = parameter_counts(spec)
    assert sum(counts.values()) == 30_532_122_624
    assert counts["experts"] == 48 * 128 * 3 * 768 * 2048
    whole = rank_bytes(spec, 0, 1, "bfloat16", range(128), 2)
    assert sum(whole.values()) == 2 * 30_532_122_624 + 2 * counts["norms"]
    halves = [rank_bytes(spec, rank, 2, "bfloat16", range(64), 2) for rank in range(2)]
    for part in ("experts", "head", "attention"):
        assert sum(half[part] for half in halves) == whole[part]
    assert all(half["embedding"] == whole["embedding"] for half in halves)
    assert kv_bytes_per_token(spec, 0, 1, "bfloat16") == 48 * 2 * 4 * 128 * 2
    assert kv_bytes_per_token(spec, 0, 8, "bfloat16") == 48 * 2 * 1 * 128 * 2


def test_reading_specs_and_headers_imports_no_torch() -> None:
    modules = "leafsum.ranks.spec, leafsum.ranks.sizes, leafsum.ranks.checkpoint, leafsum.ranks.tiny"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_the_folder_is_not_a_package_of_its_own() -> None:
    root = Path(sys.modules["leafsum.ranks.spec"].__file__ or "").resolve().parents[1]
    run = subprocess.run(
        [sys.executable, "-c", "import ranks"], cwd=root, check=False, timeout=60, capture_output=True, text=True
    )
    assert run.returncode == 1
    assert "attempted relative import" in run.stderr
