"""What a rank keeps in memory: its share of what is split, all of what is copied, and no n-gram table."""

from __future__ import annotations

import gc
import re
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_checkpoints import FAMILIES
from leafsum.collectives.placement import Placement
from leafsum.collectives.testing import ThreadTransport, run_processes, run_ranks
from leafsum.collectives.transport import SingleRank, Transport
from leafsum.collectives.tree import CanonicalTree
from leafsum.ranks.configs.load import load_spec
from leafsum.ranks.footprint import (
    REPLICATED_PARTS,
    index_bytes_per_token,
    kv_bytes_per_token,
    parameter_counts,
    rank_bytes,
    state_bytes_per_slot,
)
from leafsum.ranks.spec import ModelSpec
from model_runs import build
from slot_runs import Slots
from zero_checkpoints import write_zeros

SCRIPT = Path(__file__).parents[1] / "memory_rank.py"
MOST_OF_HALF = 0.55
NUM_SLOTS, NUM_ROWS, PAGE_SIZE = 2, 64, 16
EVEN: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_value_head_dim": 16,
    "vocab_size": 128,
    "num_experts": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
"""Halves of heads, experts and vocabulary, none of them shared; whole blocks of 16 columns."""
LARGE: dict[str, Any] = {
    "hidden_size": 256,
    "num_experts": 64,
    "moe_intermediate_size": 352,
    "vocab_size": 1024,
}
"""With EVEN: 104 MB of experts."""
TABLE_ROWS_FROM = 4_200_000
"""Of each of four heads; with the width below, 8.6 GB."""


def kept_bytes(root: object) -> int:
    """Bytes of all tensors and arrays that an object holds, directly or not; shared memory counts once."""
    seen: set[int] = set()
    storages: dict[int, int] = {}
    held: list[object] = [root]
    while held:
        each = held.pop()
        if id(each) in seen or isinstance(each, type | types.ModuleType | ThreadTransport | SingleRank):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(each, np.ndarray) and each.base is None:
            storages[each.ctypes.data] = each.nbytes
        elif isinstance(each, types.FunctionType):
            held.extend(each.__closure__ or ())
        else:
            held.extend(gc.get_referents(each))
    return sum(storages.values())


def weight_bytes(spec: ModelSpec, rank: int, num_ranks: int) -> dict[str, int]:
    placement = Placement.contiguous(CanonicalTree(spec.num_experts, has_shared=True), num_ranks)
    return rank_bytes(spec, rank, num_ranks, "bfloat16", placement.ids_of(rank), 2)


def memory_bytes(spec: ModelSpec, rank: int, num_ranks: int) -> dict[str, int]:
    num_positions = NUM_SLOTS * NUM_ROWS
    parts = state_bytes_per_slot(spec, rank, num_ranks, "bfloat16")
    return {name: NUM_SLOTS * size for name, size in parts.items()} | {
        "pages": num_positions * kv_bytes_per_token(spec, rank, num_ranks, "bfloat16"),
        "index pages": num_positions * index_bytes_per_token(spec, rank, num_ranks, "bfloat16"),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_of_two_keeps_half_of_what_is_split(tmp_path: Path, family: str) -> None:
    spec = load_spec(write_zeros(tmp_path, family, **EVEN))

    def kept_on_rank(transport: Transport) -> int:
        model = build(tmp_path, transport, "bfloat16")
        Slots(model, NUM_SLOTS, NUM_ROWS, PAGE_SIZE)
        return kept_bytes(model)

    (whole,) = run_ranks(1, kept_on_rank)
    copied = sum(weight_bytes(spec, 0, 1)[part] for part in REPLICATED_PARTS)
    copied += sum(size for part, size in memory_bytes(spec, 0, 1).items() if part not in ("deltanet", "pages"))
    for rank, kept in enumerate(run_ranks(2, kept_on_rank)):
        counted = sum(weight_bytes(spec, rank, 2).values()) + sum(memory_bytes(spec, rank, 2).values())
        assert counted <= kept <= 1.02 * counted, "the rest is padding of narrow columns"
        assert kept <= MOST_OF_HALF * (whole - copied) + 1.02 * copied


def test_peaks_of_rank_processes(tmp_path: Path) -> None:
    """104 MB of experts are resident twice for a moment: in the mapped file and packed. Everything else is 3 MB."""
    folder = tmp_path / "model"
    write_zeros(folder, "qwen4_exp", **EVEN | LARGE)
    exits = run_processes(2, SCRIPT, "peaks", tmp_path, 60.0, folder=str(folder))
    assert [each.exit_status for each in exits] == [0, 0], [each.stderr for each in exits]
    for each in exits:
        assert each.result["alone"] > 100e6
        assert each.result["with others"] <= MOST_OF_HALF * each.result["alone"] + 30e6


def test_a_table_is_mapped(tmp_path: Path) -> None:
    """8.6 GB that no machine here needs to have: a model is there at once, and only rows that are asked for come."""
    table = {"ngram_vocab_size_base": TABLE_ROWS_FROM, "ple_embed_dim": 1024}
    spec = load_spec(write_zeros(tmp_path, "qwen4_exp", **table))
    assert 2 * parameter_counts(spec)["ngram_table"] > 8 * 2**30
    model = build(tmp_path, SingleRank(), "bfloat16")
    assert resident_bytes(tmp_path / "table.safetensors") == 0
    slots = Slots(model, 1, 100)
    slots.step((0, 0, [token % 101 for token in range(100)]))
    num_rows_read = 100 * 4
    assert 0 < resident_bytes(tmp_path / "table.safetensors") <= num_rows_read * 64 * 1024
    assert kept_bytes(model) < 2**21


def resident_bytes(file: Path) -> int:
    """Of this process's mappings of a file; 0 where it has none."""
    maps = Path("/proc/self/smaps").read_text()
    found = re.findall(rf"^\S+ .* {re.escape(str(file))}\n(?:.*\n)*?Rss:\s+(\d+) kB$", maps, re.MULTILINE)
    return 1024 * sum(map(int, found))
