"""The row law across real processes: any number of ranks, exchange, placement and number of threads give equal bits."""

from __future__ import annotations

import pytest
from leafsum.runtime.pool import WorkerPool
from leafsum.runtime.sampling import Completion, SamplingParams
from leafsum.runtime.witness import Witness

PROMPTS = [
    "Once upon a time",
    [(7 * index * index + 3) % 250 for index in range(150)],  # more than two pages of 64
    [42],
]
SAMPLING = SamplingParams(max_tokens=12, ignore_eos=True)


def serve(**fields) -> tuple[list[Completion], Witness]:
    with WorkerPool(model="tiny", digests=True, kv_tokens=512, **fields) as pool:
        completions = pool.generate(PROMPTS, SAMPLING)
        witness = pool.witness()
    assert len(witness.ranks) == fields["tp"]
    assert witness.most_live_requests == fields.get("concurrency", len(PROMPTS))
    assert all((rank.exchanges > 0) == (rank.bytes_sent > 0) == (fields["tp"] > 1) for rank in witness.ranks)
    return completions, witness


@pytest.fixture(scope="module")
def alone() -> list[Completion]:
    """One rank, one thread."""
    completions, _ = serve(tp=1, threads=1)
    assert len({each.logits_sha256 for each in completions}) == 3
    assert len({each.residual_hash for each in completions}) == 3
    return completions


def fingerprints(completions: list[Completion]) -> list[tuple[object, ...]]:
    return [
        (each.token_ids, each.token_sha256, each.logits_sha256, each.residual_hash, each.finish_reason)
        for each in completions
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"tp": 1, "threads": 2, "prefill_chunk": 7, "page_size": 16},
        {"tp": 3, "threads": 1, "prefill_chunk": 64, "exchange": "nodes"},
        {"tp": 5, "threads": 2, "placement": "random:3", "concurrency": 2, "exchange": "slots"},
    ],
    ids=lambda fields: f"tp={fields['tp']}",
)
def test_tokens_logits_and_residuals_are_those_of_one_rank(alone, fields):
    completions, _ = serve(**fields)
    assert fingerprints(completions) == fingerprints(alone)
