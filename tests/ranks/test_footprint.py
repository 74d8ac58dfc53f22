"""What a model comes to, by part and by rank: every split part is there once, every other one on each rank."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import FAMILIES, write_family
from leafsum.collectives.placement import Placement
from leafsum.collectives.testing import run_ranks
from leafsum.collectives.transport import Transport
from leafsum.collectives.tree import CanonicalTree
from leafsum.ranks.checkpoint import Checkpoint
from leafsum.ranks.configs.load import load_spec
from leafsum.ranks.context import RankContext
from leafsum.ranks.footprint import (
    REPLICATED_PARTS,
    index_bytes_per_token,
    kv_bytes_per_token,
    parameter_counts,
    rank_bytes,
    rank_parameters,
    state_bytes_per_slot,
)
from leafsum.ranks.memory import MemorySizes
from leafsum.ranks.models import FAMILIES as FAMILY_BLOCKS
from leafsum.ranks.models.decoder import Decoder
from leafsum.ranks.spec import ATTENTION, DELTANET, ModelSpec
from leafsum.ranks.weights import WeightReader
from published_configs import FLASH_NEXT, QWEN3_NEXT

PART_OF = {
    "embed_tokens": "embedding", "lm_head": "head", "self_attn": "attention", "linear_attn": "deltanet",
    "gate": "router", "shared_expert_gate": "router", "shared_expert": "shared_expert", "experts": "experts",
    "indexer": "indexer", "attn_hyper_connection": "hyper_connections", "mlp_hyper_connection": "hyper_connections",
    "hyper_connection_mixer": "hyper_connections", "ple": "ngram", "ngram_embedding": "ngram_table",
}  # fmt: skip
"""A tensor's part, by the last of these that its name holds."""


def part_of(name: str) -> str | None:
    words = name.split(".")
    if any("norm" in word for word in words):
        return "norms"
    parts = [word for word in words if word in PART_OF]
    return PART_OF[parts[-1]] if parts else None


def placed(spec: ModelSpec, name: str, num_ranks: int) -> Placement:
    return Placement.named(name, CanonicalTree(spec.num_experts, has_shared=spec.shared_width > 0), num_ranks)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_by_part_are_those_stored(tmp_path: Path, family: str) -> None:
    folder = write_family(tmp_path, family, num_hidden_layers=5, layer_types=..., attention_bias=True)
    counts = dict.fromkeys(parameter_counts(load_spec(folder)), 0)
    for name, entry in Checkpoint.open(folder).entries.items():
        if entry.dtype != "I64":
            part = part_of(name)
            assert part, name
            counts[part] += math.prod(entry.shape)
    assert parameter_counts(load_spec(folder)) == counts


@pytest.mark.parametrize("placement", ["contiguous", "strided", "random:3"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_together_hold_a_model(tmp_path: Path, family: str, num_ranks: int, placement: str) -> None:
    """With a key head for each value head and a KV head for each query head, none is held twice."""
    heads = {"num_key_value_heads": 4, "linear_num_key_heads": 4}
    spec = load_spec(write_family(tmp_path, family, **heads))
    owners = placed(spec, placement, num_ranks)
    whole = parameter_counts(spec)
    ranks = [rank_parameters(spec, rank, num_ranks, owners.ids_of(rank)) for rank in range(num_ranks)]
    for part in ("attention", "deltanet", "experts", "shared_expert", "head"):
        assert sum(rank[part] for rank in ranks) == whole[part], part
    for part in REPLICATED_PARTS:
        assert {rank[part] for rank in ranks} == {whole[part]}, part
    assert sum(rank["shared_expert"] > 0 for rank in ranks) == 1
    assert all("ngram_table" not in rank for rank in ranks)


def test_key_heads_are_copied_to_ranks_that_share_them(tmp_path: Path) -> None:
    spec = load_spec(write_family(tmp_path, "qwen4_exp"))  # 2 key heads, 4 value heads
    assert spec.deltanet is not None
    halves = [rank_parameters(spec, rank, 4, ()) for rank in range(4)]
    layers, delta = len(spec.layers_of(DELTANET)), spec.deltanet
    copied = 2 * 2 * delta.key_dim * (spec.hidden_size + delta.conv_taps) * layers
    assert sum(half["deltanet"] for half in halves) == parameter_counts(spec)["deltanet"] + copied


def test_a_rank_without_heads_has_no_indexer(tmp_path: Path) -> None:
    spec = load_spec(write_family(tmp_path, "qwen4_exp"))
    assert not spec.heads(0, 5)
    without, with_heads = rank_parameters(spec, 0, 5, ()), rank_parameters(spec, 4, 5, ())
    assert (without["attention"], without["deltanet"], without["indexer"]) == (0, 0, 0)
    assert with_heads["indexer"] == parameter_counts(spec)["indexer"] > 0
    assert spec.indexer is not None
    assert spec.deltanet is not None
    num_attention, num_deltanet = len(spec.layers_of(ATTENTION)), len(spec.layers_of(DELTANET))
    of_heads = num_attention * 2 * (spec.head_dim + spec.indexer.head_dim) + num_deltanet * spec.deltanet.value_dim
    assert with_heads["norms"] - without["norms"] == of_heads
    assert index_bytes_per_token(spec, 0, 5, "bfloat16") == kv_bytes_per_token(spec, 0, 5, "bfloat16") == 0
    assert set(state_bytes_per_slot(spec, 0, 5, "bfloat16")) == {"deltanet", "ngram"}
    assert state_bytes_per_slot(spec, 0, 5, "bfloat16")["deltanet"] == 0


def spec_of(folder: Path, config: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return load_spec(folder)


def test_bytes_of_flash_next(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, FLASH_NEXT)
    counts = parameter_counts(spec)
    owned = range(spec.num_experts + 1)
    found = rank_bytes(spec, 0, 1, "bfloat16", owned, 2)
    fp32 = {"norms": counts["norms"], "ngram": 10240 * 4, "deltanet": 36 * (10240 * 4 + 2 * 48)}
    for part, num_bytes in found.items():
        assert num_bytes == 2 * counts[part] + 2 * fp32.get(part, 0), part
    assert parameter_counts(spec)["ngram_table"] == 320_001_536 * 160
    assert kv_bytes_per_token(spec, 0, 1, "bfloat16") == 12 * 2 * 2 * 256 * 2
    assert index_bytes_per_token(spec, 0, 1, "bfloat16") == 12 * 128 * 2 // 4
    assert kv_bytes_per_token(spec, 0, 2, "bfloat16") == 12 * 2 * 1 * 256 * 2


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 2), ("float32", 4)])
def test_bytes_of_a_slot_of_flash_next(tmp_path: Path, dtype: str, width: int) -> None:
    spec = spec_of(tmp_path, FLASH_NEXT)
    heads, key_heads, dim = 48, 16, 128
    for num_ranks in (1, 2):
        share = num_ranks
        states = 2 * heads * dim * dim * 4
        keys = 128 * key_heads * dim * width
        updates, decays = 128 * heads * dim * 4, 128 * heads * 4
        convolution = 68 * (2 * key_heads + heads) * dim * 4
        assert state_bytes_per_slot(spec, 0, num_ranks, dtype) == {
            "deltanet": 36 * (states + keys + updates + decays + convolution) // share,
            "indexer": 12 * 68 * 128 * 4,
            "ngram": 74 * 4 * 2560 * 4 + 67 * 8,
        }
    assert set(state_bytes_per_slot(spec_of(tmp_path, QWEN3_NEXT), 0, 1, dtype)) == {"deltanet"}


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_keeps_and_reads_what_is_said(tmp_path: Path, family: str, num_ranks: int) -> None:
    """At 5 ranks one has no heads; the rows of a table are mapped, not read."""
    folder = write_family(tmp_path, family, dtype="float32")
    spec = load_spec(folder)
    sizes = MemorySizes(num_slots=3, num_pages=5, page_size=16, dtype="bfloat16")

    def bytes_kept(transport: Transport) -> tuple[int, int, int]:
        context = RankContext(transport.rank, num_ranks, "bfloat16", "auto", "strided", transport)
        with WeightReader(Checkpoint.open(folder), "bfloat16") as reader:
            memory = Decoder(FAMILY_BLOCKS[family], spec, reader, context).allocate(sizes)
        return num_bytes(memory.paged()), num_bytes(memory.of_slots()), reader.bytes_read

    owners = placed(spec, "strided", num_ranks)
    for rank, (paged, of_slots, read) in enumerate(run_ranks(num_ranks, bytes_kept)):
        num_kept = sum(rank_parameters(spec, rank, num_ranks, owners.ids_of(rank)).values())
        assert read == 4 * (num_kept + num_read_in_vain(spec, rank, num_ranks)) + hash_bytes(spec)
        of_token = kv_bytes_per_token(spec, rank, num_ranks, "bfloat16")
        of_token += index_bytes_per_token(spec, rank, num_ranks, "bfloat16")
        assert paged == 5 * 16 * of_token
        assert of_slots == 3 * sum(state_bytes_per_slot(spec, rank, num_ranks, "bfloat16").values())


def num_read_in_vain(spec: ModelSpec, rank: int, num_ranks: int) -> int:
    """Fused projections lie by key head: v, z, b and a of all value heads that use it are read with it."""
    delta = spec.deltanet
    if delta is None or not delta.fused_projections:
        return 0
    others = len(delta.key_heads(rank, num_ranks)) * delta.heads_per_key_head
    others -= len(delta.value_heads(rank, num_ranks))
    return len(spec.layers_of(DELTANET)) * others * (2 * delta.value_dim + 2) * spec.hidden_size


def hash_bytes(spec: ModelSpec) -> int:
    """Multipliers, sizes and offsets of n-gram tables, I64: read to be compared, and kept by nobody."""
    ngram = spec.ngram
    return 8 * len(ngram.layers) * (ngram.ngram_size + 2 * ngram.num_heads) if ngram else 0


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
