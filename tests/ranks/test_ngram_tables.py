"""The tables of the n-gram embedding are those that transformers would make, and are found at once."""

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leafsum.ranks.ngram_tables import multipliers, padded_rows, table_sizes
from leafsum.ranks.spec import MAX_NGRAM_BASE, MAX_NGRAM_TABLES, NgramSpec
from transformers.models.qwen4_exp.modeling_qwen4_exp import _build_layer_multipliers, _find_nth_prime_after


def ngram_of(
    vocab_base: int = 20_000_000, heads_per_ngram: int = 8, ngram_size: int = 3, seed: int = 1234
) -> NgramSpec:
    return NgramSpec(
        layers=(1, 4),
        embed_dim=(ngram_size - 1) * heads_per_ngram,
        conv_taps=4,
        ngram_size=ngram_size,
        heads_per_ngram=heads_per_ngram,
        vocab_base=vocab_base,
        divisor=128,
        seed=seed,
        end_id=0,
    )


def test_the_published_table() -> None:
    """320,001,536 rows, as its files hold them."""
    started = time.process_time()
    sizes = table_sizes(ngram_of(), 0)
    assert time.process_time() - started < 0.3
    assert (sizes[0], sizes[-1], sum(sizes)) == (20_000_003, 20_000_171, 320_001_446)
    assert padded_rows(ngram_of(), 0) == 320_001_536


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    vocab_base=st.one_of(st.integers(1, 3000), st.integers(10**6, 10**6 + 10**5)),
    heads_per_ngram=st.integers(1, 5),
    ngram_size=st.integers(2, 5),
    index=st.integers(0, 3),
)
def test_sizes_are_those_of_transformers(vocab_base: int, heads_per_ngram: int, ngram_size: int, index: int) -> None:
    ngram = ngram_of(vocab_base, heads_per_ngram, ngram_size)
    numbers = range(index * ngram.num_heads + 1, (index + 1) * ngram.num_heads + 1)
    expected = tuple(_find_nth_prime_after(vocab_base - 1, number) for number in numbers)
    assert table_sizes(ngram, index) == expected
    assert padded_rows(ngram, index) == math.ceil(sum(expected) / 128) * 128


@pytest.mark.parametrize("pseudoprime", [2047, 1_373_653, 25_326_001])
def test_what_only_looks_like_a_prime_is_none(pseudoprime: int) -> None:
    """The least numbers that pass for primes with one, two and three of the bases."""
    first = table_sizes(ngram_of(pseudoprime), 0)[0]
    assert first == _find_nth_prime_after(pseudoprime - 1, 1) > pseudoprime


@settings(deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**63 - 1),
    vocab_size=st.one_of(st.integers(1, 300_000), st.integers(2**62, 2**63)),
    ngram_size=st.integers(2, 6),
    index=st.integers(0, 50),
)
def test_multipliers_are_those_of_transformers(seed: int, vocab_size: int, ngram_size: int, index: int) -> None:
    found = multipliers(ngram_of(ngram_size=ngram_size, seed=seed), vocab_size, index)
    assert list(found) == _build_layer_multipliers(vocab_size, ngram_size, index, seed).tolist()
    assert all(multiplier % 2 and 0 < multiplier < 2**63 for multiplier in found)


@pytest.mark.parametrize("base", [1, MAX_NGRAM_BASE])
def test_the_most_tables_are_found_at_once(base: int) -> None:
    started = time.process_time()
    sizes = table_sizes(ngram_of(base, heads_per_ngram=8, ngram_size=3), MAX_NGRAM_TABLES // 16 - 1)
    assert time.process_time() - started < 5
    assert len(sizes) == 16
    assert all(_is_prime(size) for size in sizes)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
