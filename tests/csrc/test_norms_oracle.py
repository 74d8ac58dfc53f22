"""rms_norm is the oracle's: the lane rule, two roundings for r, two for y."""

from __future__ import annotations

import numpy as np
import pytest
from bits import assert_same_bits
from leafsum import _C
from machines import machines
from oracle.inputs import KINDS, numbers
from oracle.norms import rms_norm


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 5, 63, 64, 65, 128, 200])
@pytest.mark.parametrize("one_plus_weight", [False, True])
def test_rms_norm(kind: str, width: int, one_plus_weight: bool) -> None:
    x, weight = numbers("x", (6, width), kind), numbers("weight", (width,))
    for eps in (1e-6, 1e-5):
        expected = rms_norm(x, weight, eps, one_plus_weight)
        for _ in machines():
            assert_same_bits(_C.rms_norm(x, weight, eps, one_plus_weight), expected, any_nan=kind == "special")


def test_leading_axes_are_rows() -> None:
    x, weight = numbers("x", (3, 4, 80)), numbers("weight", (80,))
    assert_same_bits(_C.rms_norm(x, weight, 1e-6, False), rms_norm(x, weight, 1e-6))
    assert_same_bits(_C.rms_norm(x[0, 0], weight, 1e-6, False), rms_norm(x, weight, 1e-6)[0, 0])


def test_the_lane_rule_is_not_a_plain_chain() -> None:
    x, weight = numbers("x", (20, 200)), np.ones(200, dtype=np.float32)
    backwards = np.ascontiguousarray(x[:, ::-1])
    forward, backward = (_C.rms_norm(values, weight, 1e-6, False) for values in (x, backwards))
    assert (forward != backward[:, ::-1]).any(), "these rows must be able to tell one order from another"
