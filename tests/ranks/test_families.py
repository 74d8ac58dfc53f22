"""Families with DeltaNet: config.json becomes a ModelSpec, whose names and shapes are what transformers writes."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from family_checkpoints import FAMILIES, config_fields, model_class, write_family
from hypothesis import given, settings
from hypothesis import strategies as st
from leafsum.errors import ModelError
from leafsum.ranks.checkpoint import BUFFER_NAMES, Checkpoint
from leafsum.ranks.configs.load import load_spec
from leafsum.ranks.footprint import parameter_counts
from leafsum.ranks.rope import frequencies
from leafsum.ranks.sizes import expected_tensors, ignored_prefixes, table_names
from leafsum.ranks.spec import ATTENTION, DELTANET, DeltaNetSpec, HyperSpec, IndexerSpec, ModelSpec, NgramSpec
from published_configs import FLASH_NEXT, FLASH_NEXT_TEXT, QWEN3_5_MOE_TEXT, QWEN3_NEXT

WRAPPED = [
    (family, wrapped) for family in FAMILIES for wrapped in (False, True) if family != "qwen3_next" or not wrapped
]


def spec_of(folder: Path, config: dict[str, Any], generation: dict | None = None) -> ModelSpec:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_spec(folder)


def flash_next(**changes: Any) -> dict[str, Any]:
    """The text config with some fields changed; a field set to ... is left out."""
    return {name: value for name, value in (FLASH_NEXT_TEXT | changes).items() if value is not ...}


def test_flash_next_as_published(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, FLASH_NEXT)
    assert (spec.family, spec.tensor_prefix) == ("qwen4_exp", "model.language_model.")
    assert (spec.num_layers, spec.hidden_size, spec.residual_size, spec.vocab_size) == (48, 2560, 10240, 248320)
    assert spec.layer_kinds == (DELTANET, DELTANET, DELTANET, ATTENTION) * 12
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.rotary_dim) == (24, 2, 256, 64)
    assert (spec.query_gate, spec.offset_norms, spec.attention_bias, spec.tied_embeddings) == (True, True, False, False)
    assert (spec.num_experts, spec.top_k, spec.expert_width, spec.shared_width, spec.renormalise) == (
        512, 10, 640, 640, True,
    )  # fmt: skip
    assert spec.deltanet == DeltaNetSpec(16, 48, 128, 128, 4, "sigmoid", False)
    assert spec.indexer == IndexerSpec(num_heads=4, head_dim=128, budget=2048, block_size=4)
    assert spec.hyper == HyperSpec(num_streams=4, low_rank=320)
    assert spec.ngram == NgramSpec((1,), 2560, 4, 3, 8, 20_000_000, 128, 1234, 248044)
    assert (spec.rope.kind, spec.rope.theta, spec.max_context, spec.eos_ids) == ("default", 1e7, 262144, (248044,))
    assert spec.dense_layers == ()


def test_the_text_alone_is_the_same_model(tmp_path: Path) -> None:
    wrapped, text = spec_of(tmp_path / "w", FLASH_NEXT), spec_of(tmp_path / "t", FLASH_NEXT_TEXT)
    assert text.tensor_prefix == "model."
    names = [name for name in ModelSpec.__slots__ if name != "tensor_prefix"]
    assert [getattr(text, name) for name in names] == [getattr(wrapped, name) for name in names]


def test_relatives_as_published(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, QWEN3_NEXT)
    assert (spec.family, spec.layers_of(ATTENTION), spec.rotary_dim) == ("qwen3_next", tuple(range(3, 48, 4)), 64)
    assert spec.deltanet == DeltaNetSpec(16, 32, 128, 128, 4, "silu", True)
    assert (spec.indexer, spec.hyper, spec.ngram, spec.renormalise) == (None, None, None, True)
    spec = spec_of(tmp_path, QWEN3_5_MOE_TEXT | {"norm_topk_prob": False})
    assert (spec.family, len(spec.layers_of(ATTENTION)), spec.rotary_dim) == ("qwen3_5_moe", 10, 64)
    assert spec.deltanet == DeltaNetSpec(16, 32, 128, 128, 4, "silu", False)
    assert spec.renormalise  # its router knows no other way


@pytest.mark.parametrize(
    ("config", "billions", "experts"),
    [
        (FLASH_NEXT, 176.943899520, 48 * 512 * 3 * 640 * 2560),
        (QWEN3_NEXT, 79.674391296, 48 * 512 * 3 * 512 * 2048),
        (QWEN3_5_MOE_TEXT, 34.660610688, 40 * 256 * 3 * 512 * 2048),
    ],
)
def test_sizes_of_published_models(tmp_path: Path, config: dict, billions: float, experts: int) -> None:
    """Cards say 125B and a table of 51.2B, 80B, 35B."""
    spec = spec_of(tmp_path, config)
    counts = parameter_counts(spec)
    assert (sum(counts.values()), counts["experts"]) == (round(billions * 1e9), experts)
    assert sum(counts.values()) == sum(math.prod(shape) for shape in expected_tensors(spec, {}).values())
    assert counts["ngram_table"] == (320_001_536 * 160 if spec.ngram else 0)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_hidden_layers": 5, "layer_types": ..., "attention_bias": True, "linear_conv_kernel_dim": 3},
    {"rope_parameters": ...},
    {"tie_word_embeddings": True, "layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("family", "wrapped"), WRAPPED)
def test_what_transformers_writes(tmp_path: Path, family: str, wrapped: bool, options: dict) -> None:
    fields = config_fields(family, wrapped, options)
    model = model_class(family, wrapped)
    instance = model(model.config_class(**fields))
    instance.save_pretrained(tmp_path, max_shard_size="60KB")
    spec, checkpoint = load_spec(tmp_path), Checkpoint.open(tmp_path)
    shapes = expected_tensors(spec, checkpoint.entries)
    checkpoint.check(shapes, ignored_prefixes(spec))
    assert len(checkpoint.files) > 1
    beside = {name for name in checkpoint.entries if name.startswith("model.visual.")}
    assert bool(beside) == wrapped
    assert shapes == {name: entry.shape for name, entry in checkpoint.entries.items() if name not in beside}
    language = instance.get_decoder().state_dict()
    rotated = instance.get_decoder().rotary_emb.inv_freq.tolist()
    assert frequencies(spec.rope, spec.rotary_dim) == pytest.approx(rotated, rel=1e-6)
    head = 0 if spec.tied_embeddings else instance.lm_head.weight.numel()
    stored = sum(tensor.numel() for tensor in language.values() if tensor.is_floating_point())
    assert sum(parameter_counts(spec).values()) == stored + head


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("family", "wrapped"), WRAPPED)
def test_every_published_layout_is_whole(tmp_path: Path, family: str, wrapped: bool, fused: bool) -> None:
    folder = write_family(tmp_path, family, wrapped=wrapped, fused=fused, whole_table=fused, num_shards=3)
    spec, checkpoint = load_spec(folder), Checkpoint.open(folder)
    checkpoint.check(expected_tensors(spec, checkpoint.entries), ignored_prefixes(spec))
    if spec.ngram:
        assert len(table_names(spec, spec.ngram.layers[0], checkpoint.entries)) == (1 if fused else 4)


def test_a_dense_layer_of_qwen3_next(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "qwen3_next", mlp_only_layers=[1])
    spec, checkpoint = load_spec(folder), Checkpoint.open(folder)
    assert (spec.dense_layers, spec.dense_width) == ((1,), 32)
    checkpoint.check(expected_tensors(spec, checkpoint.entries), ignored_prefixes(spec))


def edited(folder: Path, edit: dict[str, Any]) -> tuple[ModelSpec, Checkpoint]:
    """The entries of a stored qwen4_exp with some tensors renamed (or dropped: None)."""
    folder = write_family(folder, "qwen4_exp")
    spec, checkpoint = load_spec(folder), Checkpoint.open(folder)
    entries = {edit.get(name, name): entry for name, entry in checkpoint.entries.items() if edit.get(name, name)}
    return spec, Checkpoint(folder, checkpoint.files, entries, checkpoint.digest)


EMBEDDING = "model.layers.1.ple.ple_embedding"


def test_buffers_may_be_absent(tmp_path: Path) -> None:
    spec, checkpoint = edited(tmp_path, {f"{EMBEDDING}.{buffer}": None for buffer in BUFFER_NAMES})
    checkpoint.check(expected_tensors(spec, checkpoint.entries), ignored_prefixes(spec))


def test_a_buffer_that_is_no_integer_is_refused(tmp_path: Path) -> None:
    spec, checkpoint = edited(tmp_path, {})
    name = f"{EMBEDDING}.layer_multipliers"
    entries = dict(checkpoint.entries) | {name: checkpoint.entries[name]._replace(dtype="F32")}
    with pytest.raises(ModelError, match=r"1 of a type not read \(.*layer_multipliers is F32\)"):
        Checkpoint(tmp_path, checkpoint.files, entries, "").check(expected_tensors(spec, entries))


def test_shards_of_a_table_may_be_of_any_lengths_that_add_up(tmp_path: Path) -> None:
    spec, checkpoint = edited(tmp_path, {})
    first, second = (f"{EMBEDDING}.ngram_embedding.shard_{shard}.weight" for shard in range(2))
    rows, width = checkpoint.entries[first].shape

    def with_rows(of_first: int, of_second: int) -> None:
        entries = dict(checkpoint.entries)
        for name, num_rows in ((first, of_first), (second, of_second)):
            entries[name] = entries[name]._replace(shape=(num_rows, width))
        changed = Checkpoint(tmp_path, checkpoint.files, entries, "")
        changed.check(expected_tensors(spec, entries), ignored_prefixes(spec))

    with_rows(rows - 7, rows + 7)
    with pytest.raises(ModelError, match="misshapen"):
        with_rows(0, 2 * rows)
    with pytest.raises(ModelError, match=rf"1 misshapen \(.*shard_3\.weight is .*, expected \({rows + 7}, {width}\)"):
        with_rows(rows - 7, rows)


def test_shards_of_a_table_are_numbered_from_zero(tmp_path: Path) -> None:
    gap = {f"{EMBEDDING}.ngram_embedding.shard_1.weight": f"{EMBEDDING}.ngram_embedding.shard_9.weight"}
    spec, checkpoint = edited(tmp_path, gap)
    with pytest.raises(ModelError, match=r"3 not part of this family \(.*shard_.*1 misshapen \(.*shard_0"):
        checkpoint.check(expected_tensors(spec, checkpoint.entries), ignored_prefixes(spec))


@pytest.mark.parametrize(
    ("generation", "outer", "inner", "expected"),
    [
        ({"eos_token_id": [5, 6]}, 7, 8, (5, 6)),
        ({}, 7, 8, (7,)),
        (None, ..., [8, 9], (8, 9)),
        ({"eos_token_id": None}, None, 8, (8,)),
    ],
)
def test_ids_that_end_a_text(
    tmp_path: Path, generation: dict | None, outer: object, inner: object, expected: tuple[int, ...]
) -> None:
    """An n-gram's end is the text model's own first id, whatever ends a text."""
    config = (
        FLASH_NEXT | {"text_config": flash_next(eos_token_id=inner)} | ({} if outer is ... else {"eos_token_id": outer})
    )
    spec = spec_of(tmp_path, config, generation)
    assert spec.eos_ids == expected
    assert spec.ngram is not None
    assert spec.ngram.end_id == 8


@pytest.mark.parametrize(
    ("outer", "inner", "expected"), [(True, False, True), (..., True, False), (False, True, False)]
)
def test_a_tied_head_is_what_the_whole_file_says(tmp_path: Path, outer: object, inner: bool, expected: bool) -> None:
    config = FLASH_NEXT | {"text_config": flash_next(tie_word_embeddings=inner), "tie_word_embeddings": outer}
    spec = spec_of(tmp_path, {name: value for name, value in config.items() if value is not ...})
    assert spec.tied_embeddings is expected


@pytest.mark.parametrize(
    ("changes", "rotary_dim"),
    [
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, 128),
        ({"rope_parameters": ..., "rope_scaling": {"type": "default", "partial_rotary_factor": 0.5}}, 128),
        ({"rope_parameters": ..., "partial_rotary_factor": 0.125}, 32),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}, "partial_rotary_factor": 0.125}, 128),
        ({"rope_parameters": ...}, 64),
        ({"rope_parameters": ..., "head_dim": ...}, 64),
        ({"rope_parameters": {"partial_rotary_factor": 0.3}, "head_dim": 20}, 6),
    ],
)
def test_part_of_a_head_is_rotated(tmp_path: Path, changes: dict, rotary_dim: int) -> None:
    config = QWEN3_5_MOE_TEXT | changes
    assert spec_of(tmp_path, {k: v for k, v in config.items() if v is not ...}).rotary_dim == rotary_dim


def test_layer_kinds_follow_the_interval(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, flash_next(layer_types=..., full_attention_interval=3, num_hidden_layers=7))
    assert spec.layers_of(ATTENTION) == (2, 5)
    alone = spec_of(
        tmp_path, flash_next(layer_types=["linear_attention"] * 48, indexer_budget=..., ple_layer_ids=[2, 9, 2])
    )
    assert (alone.indexer, alone.ngram and alone.ngram.layers) == (None, (1, 8))
    other = spec_of(tmp_path, flash_next(layer_types=["indexed_attention"] * 48, ple_layer_ids=[], eos_token_id=...))
    assert (other.deltanet, other.ngram, other.layers_of(DELTANET), other.eos_ids) == (None, None, (), ())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"layer_types": ["linear_attention"]},
            "layer_types: expected a list of num_hidden_layers = 48 kinds, not of 1",
        ),
        ({"layer_types": ["mamba"] * 48}, "layer_types: expected kinds of linear_attention, .*, not 'mamba'"),
        ({"layer_types": [1] * 48}, "layer_types: expected a list of strings"),
        (
            {"linear_num_value_heads": 40},
            "linear_num_value_heads: expected a multiple of linear_num_key_heads = 16, got 40",
        ),
        (
            {"linear_conv_kernel_dim": 66},
            "linear_conv_kernel_dim: expected an integer of at least 1 and at most 65, got",
        ),
        ({"output_gate_type": "tanh"}, "output_gate_type = 'tanh' is not supported; supported: silu or sigmoid"),
        ({"attn_output_gate": False}, "attn_output_gate = False is not supported; supported: true"),
        ({"indexer_budget": ...}, "indexer_budget: expected an integer .*, it is not there"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads = 2 is not supported; supported: 1"),
        ({"indexer_budget": 2050}, "indexer_budget: expected a multiple of indexer_compress_ratio = 4, got 2050"),
        ({"indexer_head_dim": 32}, "indexer_head_dim: expected at least the 64 elements of a head .*, got 32"),
        ({"hc_count": 1}, "hc_count: expected an integer of at least 2 and at most 64, got 1"),
        ({"hc_count": 10**9}, "hc_count: expected .* at most 64"),
        ({"ple_layer_ids": [0]}, "ple_layer_ids: expected layers counted from 1 to num_hidden_layers = 48, got"),
        ({"ple_layer_ids": [49]}, "ple_layer_ids: expected layers counted from 1"),
        ({"ple_layer_ids": [4]}, "ple_layer_ids = .4. is not supported; supported: layers of linear_attention alone"),
        ({"eos_token_id": ...}, "eos_token_id: expected an id below vocab_size = 248320, behind which .*, it is not"),
        ({"ple_embed_dim": 2561}, "ple_embed_dim: expected a multiple of the 16 n-gram heads, .* got 2561"),
        ({"heads_per_ngram": 1000}, "heads_per_ngram: expected at most 1024 tables in all"),
        ({"ngram_size": 1}, "ngram_size: expected an integer of at least 2"),
        ({"ngram_size": 10**6}, "ngram_size: expected .* at most 65"),
        ({"ple_conv_kernel_size": 40}, r"ple_conv_kernel_size: expected \(taps - 1\) \* ngram_size of at most 64 pos"),
        ({"ngram_vocab_size_base": 10**15}, "ngram_vocab_size_base: expected .* at most 2,147,483,648"),
        ({"seed": -1}, "seed: expected an integer of at least 0"),
        ({"quantization_config": {"quant_method": "exl3"}}, "quantization_config = .* is not supported"),
        ({"rope_parameters": {"rope_type": "default", "sections": [1]}}, r"rope_parameters\.sections = .* is not supp"),
        (
            {"rope_parameters": {"partial_rotary_factor": 2}},
            r"partial_rotary_factor: expected a share of head_dim = 256",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.012}}, "partial_rotary_factor: expected a share of head_dim"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size: expected an integer of at least 1"),
        ({"model_type": "qwen4_exp"}, "text_config: expected an object with the fields of the text model"),
    ],
)
def test_what_is_refused_is_named(tmp_path: Path, changes: dict, named: str) -> None:
    with pytest.raises(ModelError, match=named) as caught:
        spec_of(tmp_path, flash_next(**changes))
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"quantization_config": {"bits": 4}}, "config.json: quantization_config = .* is not supported"),
        ({"text_config": flash_next(quantization_config={"bits": 4})}, r"text_config\.quantization_config = .* is not"),
        ({"text_config": flash_next(hidden_size=0)}, r"text_config\.hidden_size: expected an integer of at least 1"),
        (
            {"text_config": flash_next(model_type="qwen3_5_moe_text")},
            r"text_config\.model_type: expected qwen4_exp_text",
        ),
        ({"text_config": [1]}, "text_config: expected an object"),
    ],
)
def test_a_wrapped_field_is_named_where_it_stands(tmp_path: Path, changes: dict, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        spec_of(tmp_path, FLASH_NEXT | changes)


def test_other_gates_of_relatives_are_refused(tmp_path: Path) -> None:
    for config in (QWEN3_NEXT, QWEN3_5_MOE_TEXT):
        with pytest.raises(ModelError, match="output_gate_type = 'sigmoid' is not supported; supported: silu"):
            spec_of(tmp_path, config | {"output_gate_type": "sigmoid"})
    with pytest.raises(ModelError, match=r"mrope_section.* is not supported"):
        spec_of(tmp_path, QWEN3_NEXT | {"rope_scaling": {"type": "default", "mrope_section": [1, 1, 1]}})


ABSENT = ("full_attention_interval", "rope_scaling", "ple_embed_dim", "ngram_size", "heads_per_ngram", "seed")
HOSTILE = st.one_of(
    st.none(), st.booleans(), st.integers(-1, 3), st.integers(2**20, 2**80), st.floats(), st.text(max_size=3),
    st.lists(st.integers(-1, 2**70), max_size=3), st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)  # fmt: skip


@settings(deadline=None, derandomize=True, max_examples=300)
@given(name=st.sampled_from([*sorted(FLASH_NEXT_TEXT), *ABSENT]), value=HOSTILE)
def test_any_value_of_any_field_is_read_or_named(tmp_path_factory: Any, name: str, value: object) -> None:
    folder = tmp_path_factory.getbasetemp() / "hostile"
    config = copy.deepcopy(FLASH_NEXT_TEXT) | {name: value}
    refusal = None
    try:
        assert sum(parameter_counts(spec_of(folder, config)).values()) > 0
    except ModelError as error:
        refusal = str(error)
    assert refusal is None or ("config.json: " in refusal and len(refusal) < 500 + len(str(folder)))
