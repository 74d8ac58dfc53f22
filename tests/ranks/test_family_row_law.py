"""The row law over whole models of every family: the bits of a row hang on its own tokens alone.

Every run is held against one: each prompt alone, a row a step, one rank, one thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from csrc.steps import cut, step
from hypothesis import given, settings
from hypothesis import strategies as st
from leafsum import _C
from leafsum.ranks import ops
from leafsum.ranks.rows import StepRows
from machines import machine
from model_runs import Row, Run, assert_same_run, run_steps, whole
from property_models import DTYPES, LENGTHS, MODELS, PropertyModels, prompts

PROPERTY = settings(max_examples=6, deadline=None, derandomize=True, database=None)
PAGE_SIZES = (1, 5, 16, 64)
CHUNKS = {"float32": (3, 64), "bfloat16": (2, 3, 5, 16, 64), "float16": (5,)}

families = pytest.mark.parametrize("family", MODELS)
sizes = st.sampled_from([0, 1, 2, 3, 7, 16, 63, 64, 65])
batches = st.lists(st.tuples(*[sizes] * len(LENGTHS)), max_size=8)
"""Of each step, how many rows of each prompt come; a last step brings all that are left."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> PropertyModels:
    return PropertyModels(tmp_path_factory.mktemp("models"))


def steps_of(sizes_of_steps: Sequence[tuple[int, ...]]) -> list[list[Row]]:
    """Rows of several prompts lie in a step in any order, those of one ascend."""
    done = [0] * len(LENGTHS)
    steps: list[list[Row]] = []
    for sizes_of_step in [*sizes_of_steps, LENGTHS]:
        ends = [min(start + size, length) for start, size, length in zip(done, sizes_of_step, LENGTHS, strict=True)]
        pieces = [(prompt, done[prompt], end) for prompt, end in enumerate(ends) if end > done[prompt]]
        done = ends
        if pieces:
            steps.append(rows_of(*pieces))
    return steps


def rows_of(*pieces: tuple[int, int, int]) -> list[Row]:
    interleaved = step(*pieces)
    return list(zip(interleaved.slots.tolist(), interleaved.positions.tolist(), strict=True))


def in_chunks(lengths: Sequence[int], size: int) -> list[list[Row]]:
    """All prompts go on together, `size` rows of each a step."""
    steps = cut(dict(enumerate(lengths)), range(size, max(lengths), size))
    return [list(zip(each.slots.tolist(), each.positions.tolist(), strict=True)) for each in steps]


@families
def test_the_hazards_are_real(models: PropertyModels, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In many rows the last place of the router is a tie, and so is the indexer's last block; no two rows are alike."""
    num_ties = {"router": 0, "indexer": 0}
    real_router, real_select = ops.router, ops.select_keys

    def router(logits: torch.Tensor, top_k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        descending = logits.sort(dim=1, descending=True).values
        num_ties["router"] += int((descending[:, top_k - 1] == descending[:, top_k]).sum())
        return real_router(logits, top_k, renormalise)

    def select_keys(
        queries: torch.Tensor, pages: ops.Stored, block_size: int, budget: int, scale: float, rows: StepRows
    ) -> ops.Selection:
        found = real_select(queries, pages, block_size, budget, scale, rows)
        for row in np.flatnonzero(found.counts):
            scores = index_scores(queries[row], pages.tensor, block_size, rows, row)
            taken_blocks = found.positions[row][: found.counts[row]] // block_size
            is_taken = torch.isin(torch.arange(len(scores)), torch.from_numpy(taken_blocks))
            num_ties["indexer"] += int(scores[is_taken].min() <= scores[~is_taken].max())
        return found

    monkeypatch.setattr(ops, "router", router)
    monkeypatch.setattr(ops, "select_keys", select_keys)
    run = run_steps(models.single(family, "bfloat16"), prompts(), whole(prompts()))
    assert num_ties["router"] > 10
    assert num_ties["indexer"] > 4 or family != "qwen4_exp"
    assert len(set(run.hashes)) == sum(LENGTHS)
    assert_same_run(run, models.one_by_one(family, "bfloat16"))


def index_scores(queries: torch.Tensor, keys: torch.Tensor, block_size: int, rows: StepRows, row: int) -> torch.Tensor:
    """Of each complete block, nearly: enough to see zeros."""
    blocks = torch.arange((int(rows.positions[row]) + 1) // block_size)
    pages = rows.page_table[int(rows.slots[row])].long()[blocks // keys.shape[2]]
    return (queries.to(keys.dtype).float() @ keys[pages, :, blocks % keys.shape[2]].float().T).relu().sum(dim=0)


@families
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks(models: PropertyModels, family: str, dtype: str) -> None:
    expected = models.one_by_one(family, dtype)
    assert_same_run(models.whole(family, dtype), expected)
    for size in CHUNKS[dtype]:
        found = run_steps(models.single(family, dtype), prompts(), in_chunks(LENGTHS, size))
        assert_same_run(found, expected)


@families
def test_every_chunk_border(models: PropertyModels, family: str) -> None:
    """The longest prompt, cut once at each position."""
    first = prompts()[:1]
    rows = whole(first)[0]
    expected = first_rows(models.one_by_one(family, "bfloat16"), len(rows))
    for border in range(1, len(rows)):
        found = run_steps(models.single(family, "bfloat16"), first, [rows[:border], rows[border:]])
        assert_same_run(found, expected)


@families
@pytest.mark.parametrize("num_threads", [1, 2])
def test_pages_and_threads(models: PropertyModels, family: str, num_threads: int) -> None:
    for page_size, dtype in itertools.product(PAGE_SIZES, DTYPES):
        with machine(_C.instruction_set(), num_threads):
            found = run_steps(models.single(family, dtype), prompts(), in_chunks(LENGTHS, 37), page_size)
        assert_same_run(found, models.one_by_one(family, dtype))


@PROPERTY
@given(
    sizes_of_steps=batches,
    dtype=st.sampled_from(DTYPES),
    page_size=st.sampled_from(PAGE_SIZES),
    num_threads=st.sampled_from([1, 2]),
)
@families
def test_batches(
    models: PropertyModels,
    family: str,
    sizes_of_steps: list[tuple[int, ...]],
    dtype: str,
    page_size: int,
    num_threads: int,
) -> None:
    with machine(_C.instruction_set(), num_threads):
        found = run_steps(models.single(family, dtype), prompts(), steps_of(sizes_of_steps), page_size)
    assert_same_run(found, models.one_by_one(family, dtype))


def first_rows(run: Run, num_rows: int) -> Run:
    return Run(run.residual[:num_rows], run.logits[:num_rows], run.hashes[:num_rows], run.first_bad_layers[:num_rows])
