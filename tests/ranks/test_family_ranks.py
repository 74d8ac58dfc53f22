"""Whole models of every family on any number of ranks: equal, bit for bit, to one rank, whoever owns what.

Runs on several ranks have NaN in all memory that must not be read: experts of others, states, rings, pages, rows that
have not come.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from leafsum.collectives.placement import Placement
from leafsum.collectives.tree import CanonicalTree
from leafsum.ranks import poison
from leafsum.ranks.configs.load import load_spec
from leafsum.ranks.spec import ModelSpec
from model_runs import Row, Run, assert_same_run, run_on_ranks, run_single, whole
from property_models import DTYPES, END_ID, MODELS, PropertyModels, finite, prompts, tokens_of, write_property_model

RANKS = (1, 2, 3, 4, 5, 8, 9, 13)
BOTH_EXCHANGES = (2, 3, 4, 5, 8)
EXCHANGES = ("slots", "nodes")
PLACEMENTS = ("contiguous", "strided", "random:1")
SHORT = [tokens_of("short", 70), tokens_of("shorter", 5)]
STEPS: list[list[Row]] = [
    [(0, position) for position in range(60)],
    [*((1, position) for position in range(5)), *((0, position) for position in range(60, 68))],
    [(0, 68)],
    [(0, 69)],
]
"""Chunks of one prompt and of both, and rows alone."""
SHORT[0][40] = SHORT[0][63] = SHORT[1][2] = END_ID


@dataclass(frozen=True)
class Sharing:
    """A model that is hard to share, and on how many ranks."""

    family: str
    fields: dict[str, Any]
    ranks: tuple[int, ...] = (2, 3, 4, 5, 8)


SMALL = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "hidden_size": 24}
SHARINGS = {
    "64 leaves of experts, 10 of them a row": Sharing(
        "qwen4_exp",
        SMALL
        | {
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 4,
            "ple_layer_ids": [1],
            "fused": True,
        },
        (2, 3, 5, 8),
    ),
    "8 query leaves, 8 value leaves, whose heads share key heads": Sharing(
        "qwen4_exp",
        SMALL
        | {
            "num_attention_heads": 8,
            "linear_num_value_heads": 8,
            "linear_num_key_heads": 2,
            "ple_layer_ids": [1],
        },
    ),
    "8 value leaves, fused projections": Sharing(
        "qwen3_next", SMALL | {"linear_num_value_heads": 16, "linear_num_key_heads": 4, "num_experts": 20}
    ),
    "4 query leaves, 4 value leaves, one key head": Sharing(
        "qwen3_5_moe", SMALL | {"linear_num_key_heads": 1, "num_key_value_heads": 4, "num_experts": 16}
    ),
    "1 query leaf, 2 value leaves": Sharing(
        "qwen3_next", SMALL | {"num_attention_heads": 3, "num_key_value_heads": 1, "linear_num_value_heads": 6}
    ),
    "1 query leaf, 1 value leaf": Sharing(
        "qwen4_exp",
        SMALL
        | {
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "linear_num_value_heads": 3,
            "linear_num_key_heads": 1,
            "num_experts": 20,
            "ple_layer_ids": [1],
        },
    ),
}
"""Where nothing else is said there are 13 experts: two leaves, the second of five and the shared expert."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> PropertyModels:
    return PropertyModels(tmp_path_factory.mktemp("models"))


@contextmanager
def poisoned() -> Iterator[None]:
    poison.set_poison(True)
    try:
        yield
    finally:
        poison.set_poison(False)


def in_turn(names: Sequence[str], *indices: int) -> str:
    return names[sum(indices) % len(names)]


LAYOUTS = [
    (family, num_ranks, exchange, in_turn(PLACEMENTS, f, r, e), in_turn(DTYPES, r, 2 * e))
    for (f, family), (r, num_ranks), (e, exchange) in itertools.product(
        enumerate(MODELS), enumerate(RANKS), enumerate(EXCHANGES)
    )
    if num_ranks in BOTH_EXCHANGES or exchange == in_turn(EXCHANGES, f, r)
]
"""Every family with every number of ranks; placements and dtypes take turns, and above 8 ranks exchanges as well."""
SHARED_LAYOUTS = [
    (name, num_ranks, in_turn(EXCHANGES, s, r), in_turn(PLACEMENTS, s, r))
    for s, (name, sharing) in enumerate(SHARINGS.items())
    for r, num_ranks in enumerate(sharing.ranks)
]


@pytest.mark.parametrize(("family", "num_ranks", "exchange", "placement", "dtype"), LAYOUTS)
def test_ranks(models: PropertyModels, family: str, num_ranks: int, exchange: str, placement: str, dtype: str) -> None:
    folder = models.folder(family)
    with poisoned():
        run = run_on_ranks(folder, prompts(), whole(prompts()), dtype, num_ranks, exchange, placement)
    assert_same_run(run, models.whole(family, dtype))


@pytest.fixture(scope="module")
def shared_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = tmp_path_factory.mktemp("shared")
    return {
        name: write_property_model(folders / str(index), sharing.family, **{"num_experts": 13} | sharing.fields)
        for index, (name, sharing) in enumerate(SHARINGS.items())
    }


@pytest.fixture(scope="module")
def shared_runs(shared_models: dict[str, Path]) -> dict[str, Run]:
    return {
        name: finite(run_single(folder, SHORT, whole(SHORT), dtype_of(name))) for name, folder in shared_models.items()
    }


def dtype_of(name: str) -> str:
    return in_turn(DTYPES, list(SHARINGS).index(name), 1)


@pytest.mark.parametrize(("name", "num_ranks", "exchange", "placement"), SHARED_LAYOUTS)
def test_what_is_hard_to_share(
    shared_models: dict[str, Path],
    shared_runs: dict[str, Run],
    name: str,
    num_ranks: int,
    exchange: str,
    placement: str,
) -> None:
    with poisoned():
        run = run_on_ranks(shared_models[name], SHORT, STEPS, dtype_of(name), num_ranks, exchange, placement)
    assert_same_run(run, shared_runs[name])


LEAF_0, LEAF_1 = 8, 5
OWNERS = {
    "the shared expert alone on a rank": (0,) * LEAF_0 + (1,) * LEAF_1 + (2,),
    "the shared expert with another leaf": (0,) * LEAF_0 + (1,) * LEAF_1 + (0,),
    "the shared expert with a part of its leaf": (0,) * LEAF_0 + (1, 1, 2, 2, 2) + (1,),
    "all on one rank": (1,) * (LEAF_0 + LEAF_1 + 1),
    "all on one rank but the shared expert": (1,) * (LEAF_0 + LEAF_1) + (2,),
}
"""Of 13 experts and the shared one, on three ranks."""


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("name", OWNERS)
def test_where_the_shared_expert_lies(
    models: PropertyModels, family: str, name: str, exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = models.whole(family, "bfloat16")
    given = classmethod(lambda cls, _, tree, num_ranks: cls(tree, num_ranks, OWNERS[name]))
    monkeypatch.setattr(Placement, "named", given)
    with poisoned():
        run = run_on_ranks(models.folder(family), prompts(), whole(prompts()), "bfloat16", 3, exchange, "by hand")
    assert_same_run(run, expected)


def test_the_layouts_are_those_that_matter(models: PropertyModels, shared_models: dict[str, Path]) -> None:
    """What these tests are about occurs in them: names alone would not show it."""
    specs = {family: load_spec(models.folder(family)) for family in MODELS}
    specs |= {name: load_spec(folder) for name, folder in shared_models.items()}
    layouts = [layout[:4] for layout in LAYOUTS] + SHARED_LAYOUTS
    found = set().union(*(occurrences(specs[name], num_ranks, place) for name, num_ranks, _, place in layouts))
    assert {spec.num_attention_leaves for spec in specs.values()} == {8, 4, 1}
    assert {spec.deltanet.num_leaves for spec in specs.values() if spec.deltanet} == {8, 4, 2, 1}
    assert found == {
        "no query heads", "no value heads", "no experts", "fewer leaves than ranks", "a KV head on two ranks",
        "a key head on two ranks", "an expert leaf on two ranks", "the shared expert with its leaf",
        "the shared expert elsewhere",
    }  # fmt: skip
    assert {exchange for _, _, exchange, _ in layouts} == set(EXCHANGES)


def occurrences(spec: ModelSpec, num_ranks: int, placement_name: str) -> set[str]:
    tree = CanonicalTree(spec.num_experts, has_shared=True)
    placement, delta, ranks = Placement.named(placement_name, tree, num_ranks), spec.deltanet, range(num_ranks)
    assert delta is not None
    last_leaf = {placement.owners[id_] for id_ in tree.ids_of_leaf(tree.num_leaves - 1)[:-1]}
    shared_owner = placement.owners[-1]
    held = {
        "no query heads": any(not spec.heads(rank, num_ranks) for rank in ranks),
        "no value heads": any(not delta.value_heads(rank, num_ranks) for rank in ranks),
        "no experts": any(not placement.ids_of(rank) for rank in ranks),
        "fewer leaves than ranks": tree.num_leaves < num_ranks,
        "a KV head on two ranks": has_twice(spec.kv_heads(rank, num_ranks) for rank in ranks),
        "a key head on two ranks": has_twice(delta.key_heads(rank, num_ranks) for rank in ranks),
        "an expert leaf on two ranks": bool(placement.shared_leaves),
        "the shared expert with its leaf": num_ranks > 1 and last_leaf == {shared_owner},
        "the shared expert elsewhere": shared_owner not in last_leaf,
    }
    return {name for name, is_held in held.items() if is_held}


def has_twice(of_ranks: Iterable[Iterable[int]]) -> bool:
    all_of_them = [each for of_rank in of_ranks for each in of_rank]
    return len(set(all_of_them)) < len(all_of_them)
