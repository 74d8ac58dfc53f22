"""The tables of the n-gram embedding, which no file lists: how many rows each head has, and what a hash multiplies by.

Imports no torch. docs/numerics.md, section 10.
"""

from __future__ import annotations

import functools

from .spec import NgramSpec

GAMMA = 0x9E3779B97F4A7C15
LAYER_STEP = 10007
MASK = 2**64 - 1
WITNESSES = (2, 3, 5, 7)
"""Miller-Rabin with these bases is exact below 3,215,031,751, which no table comes near."""


def table_sizes(ngram: NgramSpec, index: int) -> tuple[int, ...]:
    """Rows of each head's table in the `index`-th layer with an n-gram embedding: the next primes from the base on."""
    first = index * ngram.num_heads
    return _primes_from(ngram.vocab_base, first + ngram.num_heads)[first:]


def padded_rows(ngram: NgramSpec, index: int) -> int:
    """Rows of a layer's tables one behind the other, and the padding behind the last."""
    return -(-sum(table_sizes(ngram, index)) // ngram.divisor) * ngram.divisor


def multipliers(ngram: NgramSpec, vocab_size: int, index: int) -> tuple[int, ...]:
    """Odd numbers, one for each place of an n-gram, its last token's first. A token times one stays below 2^63."""
    bound = max(1, (2**63 - 1) // vocab_size // 2)
    seed = ngram.seed + LAYER_STEP * index
    return tuple(2 * (_splitmix64(seed + GAMMA * (place + 1)) % bound) + 1 for place in range(ngram.ngram_size))


def _splitmix64(state: int) -> int:
    """One step of splitmix64: the state advanced by gamma, then mixed."""
    mixed = (state + GAMMA) & MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & MASK
    return mixed ^ mixed >> 31


@functools.lru_cache(maxsize=8)
def _primes_from(base: int, count: int) -> tuple[int, ...]:
    primes: list[int] = []
    candidate = base
    while len(primes) < count:
        if _is_prime(candidate):
            primes.append(candidate)
        candidate += 1
    return tuple(primes)


def _is_prime(number: int) -> bool:
    if number < 2 or any(number % witness == 0 for witness in WITNESSES):
        return number in WITNESSES
    num_twos = (number - 1 & 1 - number).bit_length() - 1
    odd = number - 1 >> num_twos
    return all(_passes(pow(witness, odd, number), number, num_twos) for witness in WITNESSES)


def _passes(power: int, number: int, num_twos: int) -> bool:
    """Miller and Rabin: of a prime, the power is 1, or squaring it comes to -1 before it comes to 1."""
    if power in (1, number - 1):
        return True
    for _ in range(num_twos - 1):
        power = power * power % number
        if power == number - 1:
            return True
    return False
