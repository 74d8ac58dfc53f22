"""Rotary frequencies: one rounding of the exact value, held against mpmath; their meaning against transformers."""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leafsum.ranks.rope import RopeSpec, attention_factor, frequencies, inverse_sqrt, round_to_fp32
from tiny_checkpoints import config_with
from transformers import Qwen3MoeConfig, Qwen3NextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

YARN = RopeSpec("yarn", 1e6, factor=4.0, original_max_positions=32768)


def nearest_fp32(exact: mpmath.mpf) -> float:
    """The FP32 value with the least distance to an exact value that is no tie: a search among neighbours."""
    near = np.float32(float(exact))
    candidates = [near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))]
    return float(min(candidates, key=lambda candidate: abs(mpmath.mpf(float(candidate)) - exact)))


@pytest.mark.parametrize("head_dim", [2, 16, 80, 128, 256])
@pytest.mark.parametrize("theta", [10000.0, 1e6, 5e6, 1.5, 123456.789])
def test_plain_and_linear_frequencies_are_rounded_once(head_dim: int, theta: float) -> None:
    with mpmath.workdps(50):
        exact = [mpmath.mpf(theta) ** (-mpmath.mpf(2 * i) / head_dim) for i in range(head_dim // 2)]
        assert frequencies(RopeSpec("default", theta), head_dim) == [nearest_fp32(each) for each in exact]
        linear = frequencies(RopeSpec("linear", theta, factor=3.0), head_dim)
        assert linear == [nearest_fp32(each / 3) for each in exact]


@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("beta_fast", "beta_slow"), [(32.0, 1.0), (20.5, 2.0), (1.0, 1.0)])
def test_yarn_frequencies_are_rounded_once(head_dim: int, truncate: bool, beta_fast: float, beta_slow: float) -> None:
    rope = RopeSpec(
        "yarn",
        1e6,
        factor=4.0,
        original_max_positions=32768,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=truncate,
    )
    with mpmath.workdps(50):

        def turn_index(turns: float) -> mpmath.mpf:
            return head_dim * mpmath.log(32768 / (2 * mpmath.pi * turns)) / (2 * mpmath.log(1e6))

        low, high = turn_index(beta_fast), turn_index(beta_slow)
        if truncate:
            low, high = mpmath.floor(low), mpmath.ceil(high)
        low, high = max(low, mpmath.mpf(0)), min(high, mpmath.mpf(head_dim - 1))
        high = low + mpmath.mpf("0.001") if low == high else high
        expected = []
        for i in range(head_dim // 2):
            share = min(max((i - low) / (high - low), mpmath.mpf(0)), mpmath.mpf(1))
            plain = mpmath.mpf(10) ** (-mpmath.mpf(12 * i) / head_dim)
            expected.append(nearest_fp32(plain * (1 - share) + plain * share / 4))
    assert frequencies(rope, head_dim) == expected


@pytest.mark.parametrize(
    "rope_parameters",
    [
        {"rope_type": "linear", "factor": 2.5},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "beta_fast": 16, "beta_slow": 2},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "truncate": False},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.25},
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 0.707,
            "mscale_all_dim": 1.0,
        },
    ],
)
def test_same_meaning_as_transformers(rope_parameters: dict) -> None:
    names = {"rope_type": "kind", "original_max_position_embeddings": "original_max_positions"}
    rope = RopeSpec(theta=1e6, **{names.get(name, name): value for name, value in rope_parameters.items()})
    parameters = rope_parameters | {"rope_theta": 1e6}
    # factor and context do not fit each other in every case here, which transformers only warns of in its log
    config = Qwen3MoeConfig(**config_with(rope_theta=..., rope_scaling=..., head_dim=128, rope_parameters=parameters))
    expected, expected_factor = ROPE_INIT_FUNCTIONS[rope.kind](config, "cpu")
    np.testing.assert_allclose(frequencies(rope, 128), expected.double().numpy(), rtol=2e-6)
    assert math.isclose(attention_factor(rope), expected_factor, rel_tol=1e-7)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaling_over_part_of_a_head(kind: str) -> None:
    parameters = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    parameters |= {"original_max_position_embeddings": 8192} if kind == "yarn" else {}
    config = Qwen3NextConfig(head_dim=256, rope_parameters=parameters)
    expected, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    rope = RopeSpec(kind, 1e7, factor=4.0, original_max_positions=8192)
    np.testing.assert_allclose(frequencies(rope, 64), expected.double().numpy(), rtol=2e-6)


def test_attention_factor_is_rounded_once() -> None:
    with mpmath.workdps(50):
        assert attention_factor(YARN) == nearest_fp32(1 + mpmath.log(4) / 10)
        both = RopeSpec("yarn", 1e6, factor=40.0, original_max_positions=4096, mscale=0.5, mscale_all_dim=2.0)
        exact = (1 + mpmath.mpf(0.5) * mpmath.log(40) / 10) / (1 + mpmath.mpf(2) * mpmath.log(40) / 10)
        assert attention_factor(both) == nearest_fp32(exact)
    assert attention_factor(RopeSpec("yarn", 1e6, factor=1.0, original_max_positions=64)) == 1.0
    assert attention_factor(RopeSpec("linear", 1e6, factor=4.0)) == 1.0
    given = RopeSpec("yarn", 1e6, factor=4.0, original_max_positions=64, attention_factor=1.1)
    assert attention_factor(given) == float(np.float32(1.1))


@pytest.mark.parametrize("head_dim", [1, 2, 16, 80, 128, 192, 256])
def test_inverse_sqrt_is_rounded_once(head_dim: int) -> None:
    with mpmath.workdps(50):
        assert inverse_sqrt(head_dim) == nearest_fp32(1 / mpmath.sqrt(head_dim))


@settings(deadline=None, derandomize=True)
@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-3e38, max_value=3e38))
def test_rounding_equals_the_machine_s(value: float) -> None:
    assert round_to_fp32(Fraction(value)) == float(np.float32(value))


def test_a_frequency_is_not_rounded_by_way_of_double() -> None:
    """Frequency 0 is 1 / factor. These factors bring it so near to a tie that its double is the tie."""
    num_told_apart = 0
    for odd in range(1, 400, 2):
        factor = float(1 / (1 + Fraction(odd, 2**24)))
        (frequency,) = frequencies(RopeSpec("linear", 10000.0, factor=factor), 2)
        assert frequency == round_to_fp32(1 / Fraction(factor))
        num_told_apart += frequency != float(np.float32(1 / factor))
    assert num_told_apart > 20


def test_no_double_stands_between_the_exact_value_and_its_rounding() -> None:
    """Just above a tie by less than a double can tell: a way through double would round down to even."""
    tie = 1 + Fraction(1, 2**24)
    above = tie + Fraction(1, 2**90)
    assert round_to_fp32(tie) == 1.0
    assert round_to_fp32(above) == 1.0 + 2.0**-23
    assert float(np.float32(float(above))) == 1.0
