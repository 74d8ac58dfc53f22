"""The row law over the whole model: the bits of a row hang on its own tokens alone.

Every run below is held against one: each prompt alone, a row a step, one rank, one thread. Models carry hazards: router
rows that tie, subnormal and negative-zero weights, and large terms that cancel.
"""

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from bits import assert_same_bits
from leafsum import _C
from leafsum.collectives.transport import SingleRank
from leafsum.ranks import ops
from model_runs import Row, Run, assert_same_run, build, one_by_one, run_on_ranks, run_single, run_steps, whole
from tiny_checkpoints import Tensors, write_checkpoint

DTYPES = ("float32", "bfloat16", "float16")
PROMPT_LENGTHS = (66, 1, 17, 30)

Alone = Callable[[str], Run]


def hazards(tensors: Tensors) -> None:
    """Ties of every router, subnormals in linears and norms, zeros of both signs, experts that cancel each other."""
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        router = tensors[f"{prefix}mlp.gate.weight"]
        router[10:14] = router[2:6]
        router[18:20] = -0.0
        down = [tensors[f"{prefix}mlp.experts.{expert}.down_proj.weight"] for expert in range(20)]
        down[4].mul_(1e-40)
        down[12].mul_(300.0)
        down[5].copy_(-down[12])
        tensors[f"{prefix}self_attn.o_proj.weight"][:8].mul_(1e-39)
        tensors[f"{prefix}self_attn.v_proj.weight"][3].fill_(-0.0)
        tensors[f"{prefix}input_layernorm.weight"][0] = 1e-41
    tensors["model.embed_tokens.weight"][7].fill_(-0.0)
    tensors["model.embed_tokens.weight"][8].mul_(1e-39)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(101, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]
    drawn[2][3:6] = [7, 8, 7]
    return drawn


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return write_checkpoint(path, dtype="float32", attention_bias=True, edit=hazards)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Alone:
    """The run that all others must equal, by dtype."""

    @functools.cache
    def run(dtype: str) -> Run:
        with threads(1):
            base = run_single(folder, prompts(), one_by_one(prompts()), dtype)
        assert np.isfinite(base.logits).all(), "a NaN would equal any other: pages start as NaN"
        return base

    return run


@contextmanager
def threads(num_threads: int) -> Iterator[None]:
    before = _C.num_threads()
    _C.set_num_threads(num_threads)
    try:
        yield
    finally:
        _C.set_num_threads(before)


def shuffled_steps(seed: int) -> list[list[Row]]:
    """Random batches: each step takes 0 to 9 next rows of each prompt, in a random order of prompts."""
    rng = random.Random(seed)
    done = [0] * len(PROMPT_LENGTHS)
    steps = []
    while any(position < length for position, length in zip(done, PROMPT_LENGTHS, strict=True)):
        step: list[Row] = []
        for prompt in rng.sample(range(len(done)), len(done)):
            end = min(done[prompt] + rng.randrange(10), PROMPT_LENGTHS[prompt])
            step.extend((prompt, position) for position in range(done[prompt], end))
            done[prompt] = end
        if step:
            steps.append(step)
    return steps


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_hazards_are_real(folder: Path, alone: Alone, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In many rows the last place of the router is a tie; all rows are finite, and no two alike."""
    num_ties = 0

    def router(logits: torch.Tensor, top_k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal num_ties
        descending = logits.sort(dim=1, descending=True).values
        num_ties += int((descending[:, top_k - 1] == descending[:, top_k]).sum())
        return real_router(logits, top_k, renormalise)

    real_router = ops.router
    monkeypatch.setattr(ops, "router", router)
    run = run_single(folder, prompts(), whole(prompts()), dtype)
    assert num_ties > 10
    assert np.isfinite(run.logits).all()
    assert set(run.first_bad_layers) == {-1}
    assert len(set(run.hashes)) == sum(PROMPT_LENGTHS)
    assert_same_run(run, alone(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exchange", ["slots", "nodes"])
@pytest.mark.parametrize("placement", ["contiguous", "strided", "random:5"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ranks(folder: Path, alone: Alone, num_ranks: int, placement: str, exchange: str, dtype: str) -> None:
    run = run_on_ranks(folder, prompts(), whole(prompts()), dtype, num_ranks, exchange, placement)
    assert_same_run(run, alone(dtype))


@pytest.mark.parametrize(
    ("num_ranks", "exchange"), [(1, "auto"), *itertools.product((9, 20), ("slots", "nodes"))]
)  # one rank exchanges nothing; elsewhere auto is one of the two
def test_ranks_without_heads_or_with_one_expert(folder: Path, alone: Alone, num_ranks: int, exchange: str) -> None:
    run = run_on_ranks(folder, prompts(), shuffled_steps(num_ranks), "bfloat16", num_ranks, exchange, "strided")
    assert_same_run(run, alone("bfloat16"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
def test_batches_threads_and_pages(folder: Path, alone: Alone, page_size: int, num_threads: int, dtype: str) -> None:
    with threads(num_threads):
        run = run_single(folder, prompts(), shuffled_steps(page_size), dtype, page_size)
    assert_same_run(run, alone(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_chunk_border(folder: Path, alone: Alone, dtype: str) -> None:
    """The longest prompt, cut once at each position, and cut into equal chunks of each size."""
    model = build(folder, SingleRank(), dtype)
    first = prompts()[:1]
    rows = whole(first)[0]
    expected = first_rows(alone(dtype), len(rows))
    for border in range(1, 66):
        assert_same_run(run_steps(model, first, [rows[:border], rows[border:]]), expected)
    for size in (2, 3, 5, 16, 64):
        assert_same_run(run_steps(model, first, [rows[start : start + size] for start in range(0, 66, size)]), expected)


@pytest.mark.parametrize("num_rows", range(1, 18))
def test_any_number_of_companions(folder: Path, alone: Alone, num_rows: int) -> None:
    """The row at position 16 of the third prompt, decoded in a batch of 1 to 17 rows, at every place in it."""
    model = build(folder, SingleRank(), "bfloat16")
    before = [[(prompt, position)] for prompt, position in whole(prompts())[0] if (prompt, position) < (2, 16)]
    target: Row = (2, 16)
    companions = [(3, position) for position in range(30)]
    step = companions[: num_rows - 1]
    step.insert(num_rows // 2, target)
    after = [companions[num_rows - 1 :]]
    assert_same_run(run_steps(model, prompts(), [*before, step, *after]), alone("bfloat16"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_borders_of_attention_segments(folder: Path, dtype: str) -> None:
    """330 rows: keys are cut into segments at 256, whatever the chunks, pages and ranks."""
    long = [torch.randint(101, (330,), generator=torch.Generator().manual_seed(8)).tolist()]
    rows = whole(long)[0]
    expected = run_single(folder, long, one_by_one(long), dtype)
    for cuts in ([0, 330], [0, 255, 257, 330], [0, 64, 256, 330], [0, 1, 100, 300, 330]):
        steps = [rows[start:end] for start, end in itertools.pairwise(cuts)]
        assert_same_run(run_single(folder, long, steps, dtype, page_size=100), expected)
    assert_same_run(run_on_ranks(folder, long, [rows], dtype, 3, "auto", "random"), expected)


@pytest.mark.parametrize("layout", [{"fused": True}, {"num_shards": 4}, {"fused": True, "num_shards": 3}])
def test_how_a_checkpoint_is_stored(tmp_path: Path, alone: Alone, layout: dict) -> None:
    stored = write_checkpoint(tmp_path, dtype="float32", attention_bias=True, edit=hazards, **layout)
    assert_same_run(run_single(stored, prompts(), whole(prompts()), "bfloat16"), alone("bfloat16"))


def test_a_row_that_is_not_finite_fails_alone(tmp_path: Path, folder: Path) -> None:
    """Token 50 is infinite and stands at position 9 of the first prompt: rows before it and other prompts stay."""

    def infinite(tensors: Tensors) -> None:
        hazards(tensors)
        tensors["model.embed_tokens.weight"][50].fill_(torch.inf)

    changed = [[token if token != 50 else 51 for token in tokens] for tokens in prompts()]
    expected = run_single(folder, changed, whole(changed), "bfloat16")
    spoilt = [[*changed[0][:9], 50, *changed[0][10:]], *changed[1:]]
    stored = write_checkpoint(tmp_path, dtype="float32", attention_bias=True, edit=infinite)
    run = run_on_ranks(stored, spoilt, shuffled_steps(2), "bfloat16", 3, "nodes", "strided")
    assert run.first_bad_layers == [-1] * 9 + [0] * 57 + [-1] * 48
    kept = [*range(9), *range(66, 114)]
    assert_same_bits(run.residual[kept], expected.residual[kept])
    assert_same_bits(run.logits[kept], expected.logits[kept])


def test_the_first_bad_layer_is_named(tmp_path: Path) -> None:
    def infinite(tensors: Tensors) -> None:
        tensors["model.layers.1.self_attn.o_proj.bias"][0] = torch.inf

    stored = write_checkpoint(tmp_path, attention_bias=True, num_hidden_layers=3, edit=infinite)
    run = run_single(stored, [[1, 2, 3]], whole([[1, 2, 3]]), "bfloat16")
    assert run.first_bad_layers == [1, 1, 1]


def first_rows(run: Run, num_rows: int) -> Run:
    return Run(run.residual[:num_rows], run.logits[:num_rows], run.hashes[:num_rows], run.first_bad_layers[:num_rows])
