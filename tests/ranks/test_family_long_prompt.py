"""A long prompt of the family with every block: whole and in chunks, on one rank and on two, the same bits.

Thousands of complete blocks for the indexer, hundreds of borders of DeltaNet, segments of attention over lists of keys.
"""

from __future__ import annotations

import itertools

import pytest
from leafsum.collectives.testing import run_ranks
from leafsum.collectives.transport import SingleRank, Transport
from leafsum.ranks import ops
from leafsum.ranks.models import CausalModel
from model_runs import build
from property_models import END_ID, tokens_of, write_property_model
from slot_runs import Slots

NUM_ROWS_ALONE = 5
"""At the end of a prompt in chunks."""


def prompt_of(length: int) -> list[int]:
    tokens = tokens_of("long", length)
    tokens[50::97] = [END_ID] * len(tokens[50::97])
    return tokens


def hashes(model: CausalModel, tokens: list[int], chunk: int, page_size: int) -> list[int]:
    """Of every row's residual."""
    slots = Slots(model, 1, len(tokens), page_size)
    border = len(tokens) - NUM_ROWS_ALONE
    edges = [*range(0, border, chunk), *range(border, len(tokens) + 1)]
    found: list[int] = []
    for start, end in itertools.pairwise(edges if chunk < border else [0, len(tokens)]):
        residual = slots.forward((0, start, tokens[start:end]))
        assert (residual.first_bad_layer == -1).all()
        found += ops.residual_hash(residual.rows, slots.positions(start, end)).tolist()
    return found


@pytest.mark.parametrize("length", [1_500, pytest.param(16_384, marks=pytest.mark.full)])
def test_whole_and_in_chunks_on_one_rank_and_on_two(tmp_path, length: int) -> None:
    """375 and 4,096 blocks at the end, of which a row sees 80: 320 keys in two segments of attention."""
    folder = write_property_model(tmp_path, "qwen4_exp", max_position_embeddings=32_768, indexer_budget=320)
    tokens = prompt_of(length)
    single = build(folder, SingleRank(), "bfloat16")
    expected = hashes(single, tokens, length, 64)
    assert len(set(expected)) == length
    assert hashes(single, tokens, 333, 16) == expected

    def on_rank(transport: Transport) -> list[list[int]]:
        model = build(folder, transport, "bfloat16", placement="strided")
        return [hashes(model, tokens, length, 16), hashes(model, tokens, 512, 64)]

    assert run_ranks(2, on_rank) == [[expected, expected]] * 2
