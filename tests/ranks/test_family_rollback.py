"""Going back: a request that takes back rows and goes on with others comes to the bits of one that never had them."""

from __future__ import annotations

from pathlib import Path

import pytest
from bits import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from leafsum.collectives.testing import run_ranks
from leafsum.collectives.transport import SingleRank, Transport
from leafsum.ranks.models import CausalModel
from leafsum.ranks.spec import MAX_REACH, ROLLBACK_ROWS
from model_runs import build
from numpy.typing import NDArray
from property_models import DTYPES, END_ID, MODELS, PropertyModels, tokens_of, write_property_model
from slot_runs import Slots

PROPERTY = settings(max_examples=8, deadline=None, derandomize=True, database=None)
LENGTH, NUM_OTHERS = 150, 6
"""Rows from which a request goes back over the border at 128 and over index blocks of 4, and how many it then takes."""
PROMPT = tokens_of("prompt", LENGTH)
PROMPT[100] = PROMPT[128] = END_ID
OTHERS = tokens_of("others", NUM_OTHERS)
OTHERS[3] = END_ID

families = pytest.mark.parametrize("family", MODELS)

walks = st.lists(st.tuples(st.integers(0, ROLLBACK_ROWS), st.sampled_from([1, 2, 3, 5, 17, 64, 70])), max_size=7)
"""Again and again: how many rows are taken back, and how many come instead."""
prompt_lengths = st.sampled_from([1, 3, 40, 64, 130])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> PropertyModels:
    return PropertyModels(tmp_path_factory.mktemp("models"))


def alone(slots: Slots, tokens: list[int], num_last: int) -> NDArray:
    """The last rows of these tokens in one step of slot 0, whose past is not read."""
    (rows,) = slots.step((0, 0, tokens))
    return rows[len(tokens) - num_last :]


@families
def test_by_any_number_of_rows(models: PropertyModels, family: str) -> None:
    go_back_and_on_again(models.single(family, "bfloat16"))


def test_where_blocks_look_back_as_far_as_they_may(tmp_path: Path) -> None:
    """Both convolutions reach back by 64 positions, and a block of the indexer has 64."""
    reach = {"linear_conv_kernel_dim": MAX_REACH + 1, "ple_conv_kernel_size": MAX_REACH // 4 + 1, "ngram_size": 4}
    blocks = {"indexer_compress_ratio": MAX_REACH, "indexer_budget": MAX_REACH, "ple_embed_dim": 48}
    folder = write_property_model(tmp_path, "qwen4_exp", **reach, **blocks)
    go_back_and_on_again(build(folder, SingleRank(), "bfloat16"))


def go_back_and_on_again(model: CausalModel) -> None:
    """From the same length, by any number of rows; others come as one chunk, or row by row."""
    slots = Slots(model, 2, LENGTH + NUM_OTHERS)
    (rows,) = slots.step((1, 0, PROMPT))
    for num_back in range(ROLLBACK_ROWS, 0, -1):  # last the few that bring the slot to further positions
        start = LENGTH - num_back
        expected = alone(slots, PROMPT[:start] + OTHERS, NUM_OTHERS)
        if num_back % 2:
            (found,) = slots.step((1, start, OTHERS))
            assert_same_bits(found, expected)
        else:
            for index, token in enumerate(OTHERS):
                (found,) = slots.step((1, start + index, [token]))
                assert_same_bits(found, expected[index : index + 1])
        (again,) = slots.step((1, start, PROMPT[start:]))
        assert_same_bits(again, rows[start:])


@PROPERTY
@given(num_first=prompt_lengths, walk=walks, dtype=st.sampled_from(DTYPES), page_size=st.sampled_from([1, 5, 16, 64]))
@families
def test_again_and_again(
    models: PropertyModels, family: str, num_first: int, walk: list[tuple[int, int]], dtype: str, page_size: int
) -> None:
    """At most 64 rows behind the furthest position that the slot has come to."""
    slots = Slots(models.single(family, dtype), 2, 130 + 7 * 70, page_size)
    tokens = tokens_of("walk", num_first)
    slots.step((1, 0, tokens))
    furthest = len(tokens)
    for index, (num_back, num_new) in enumerate(walk):
        start = max(0, furthest - ROLLBACK_ROWS, len(tokens) - num_back)
        new = tokens_of(f"walk {index}", num_new)
        tokens = tokens[:start] + new
        (found,) = slots.step((1, start, new))
        assert_same_bits(found, alone(slots, tokens, num_new))
        furthest = max(furthest, len(tokens))


@families
def test_beside_others_and_on_any_number_of_ranks(models: PropertyModels, family: str) -> None:
    """One slot goes back over the border while another one goes on, and a third begins."""
    expected = going_back(Slots(models.single(family, "bfloat16"), 3, 140))
    slots = Slots(models.single(family, "bfloat16"), 3, 140)
    assert_same_bits(expected[0], alone(slots, PROMPT[:90] + OTHERS, NUM_OTHERS))
    assert_same_bits(expected[1], alone(slots, PROMPT[:71], 1))
    assert_same_bits(expected[2], alone(slots, OTHERS, NUM_OTHERS))
    for num_ranks in (2, 5):

        def on_rank(transport: Transport) -> list[NDArray]:
            model = build(models.folder(family), transport, "bfloat16", placement="strided")
            return going_back(Slots(model, 3, 140))

        for of_rank in run_ranks(num_ranks, on_rank):
            for found, rows in zip(of_rank, expected, strict=True):
                assert_same_bits(found, rows)


def going_back(slots: Slots) -> list[NDArray]:
    slots.step((0, 0, PROMPT[:132]), (2, 0, PROMPT[:70]))
    return slots.step((0, 90, OTHERS), (2, 70, PROMPT[70:71]), (1, 0, OTHERS))
