"""exp, log, sin, cos, sigmoid and softplus: exact functions (320 bits) rounded once to FP32. Results are cached.

FUNCTIONS are those. The other parts of the oracle take exp, sigmoid and softplus by way of numpy's doubles where these
lie so far from a border of rounding that a thousand times their error could not reach it: the same bits in less time.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
from mpmath.ctx_mp import MPContext
from numpy.typing import NDArray

from oracle.rounding import FORMATS, nearest_bits

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Exact = Callable[[Any], Any]

mp = MPContext()
mp.prec = 320  # the hardest FP32 argument of these functions needs fewer than 100 bits
_INFINITY = FORMATS["float32"].infinity
_QUIET_NAN = FORMATS["float32"].quiet_nan
_SLACK = 2.0**-40
"""Relative, 4096 times the last place of a double."""


class CorrectlyRounded:
    """A function of one FP32 argument, the exact value rounded once; `special` gives the arguments without one."""

    def __init__(self, exact: Exact, *special: tuple[float, float], negative_is_nan: bool = False) -> None:
        self._exact, self._negative_is_nan = exact, negative_is_nan
        self._known = {int(np.float32(x).view(np.uint32)): int(np.float32(y).view(np.uint32)) for x, y in special}

    def __call__(self, x: F32 | np.float32) -> F32:
        arguments = np.atleast_1d(np.asarray(x, dtype=np.float32)).view(np.uint32)
        distinct, where = np.unique(arguments, return_inverse=True)
        values = np.array([self._bits(int(argument)) for argument in distinct], dtype=np.uint32)
        return values[where].reshape(np.shape(x)).view(np.float32)

    def _bits(self, argument: int) -> int:
        if argument not in self._known:
            self._known[argument] = self._evaluate(np.uint32(argument).view(np.float32))
        return self._known[argument]

    def _evaluate(self, x: np.float32) -> int:
        if np.isnan(x) or (self._negative_is_nan and x < 0):
            return _QUIET_NAN
        return _round_big(self._exact(mp.mpf(float(x))))


class ByDoubles:
    """The same function of values that are never negative; where the double could round two ways, the exact one."""

    def __init__(self, exact: CorrectlyRounded, approximate: Callable[[F64], F64]) -> None:
        self._exact, self._approximate = exact, approximate

    def __call__(self, x: F32 | np.float32) -> F32:
        arguments = np.atleast_1d(np.asarray(x, dtype=np.float32))
        with np.errstate(all="ignore"):
            doubles = self._approximate(arguments.astype(np.float64))
            low, high = ((doubles * (1 + slack)).astype(np.float32) for slack in (-_SLACK, _SLACK))
        unclear = ~((low == high) & (doubles < 1e30))  # NaN is unclear too
        if unclear.any():
            low[unclear] = self._exact(arguments[unclear])
        return low.reshape(np.shape(x))


def _round_big(value: Any) -> int:
    """An mpf rounded to FP32; far exponents are cut first, a Fraction would hold them in full."""
    sign, significand, exponent, num_bits = value._mpf_
    sign_bit = FORMATS["float32"].sign_bit if sign else 0
    if significand == 0 or exponent + num_bits < -160:
        return sign_bit
    if exponent + num_bits > 140:
        return sign_bit | _INFINITY
    return sign_bit | nearest_bits(Fraction(int(significand)) * Fraction(2) ** int(exponent))


def _exact_sigmoid(x: Any) -> Any:
    return 1 / (1 + mp.exp(-x))


def _exact_softplus(x: Any) -> Any:
    return mp.log1p(mp.exp(x))


_INF, _NAN = float("inf"), float("nan")
log = CorrectlyRounded(mp.log, (_INF, _INF), (0.0, -_INF), (-0.0, -_INF), negative_is_nan=True)
sin = CorrectlyRounded(mp.sin, (_INF, _NAN), (-_INF, _NAN), (-0.0, -0.0))
cos = CorrectlyRounded(mp.cos, (_INF, _NAN), (-_INF, _NAN))
FUNCTIONS = {
    "exp": CorrectlyRounded(mp.exp, (_INF, _INF), (-_INF, 0.0)),
    "log": log,
    "sin": sin,
    "cos": cos,
    "sigmoid": CorrectlyRounded(_exact_sigmoid, (_INF, 1.0), (-_INF, 0.0)),
    "softplus": CorrectlyRounded(_exact_softplus, (_INF, _INF), (-_INF, 0.0)),
}
exp = ByDoubles(FUNCTIONS["exp"], np.exp)
sigmoid = ByDoubles(FUNCTIONS["sigmoid"], lambda x: 1 / (1 + np.exp(-x)))
softplus = ByDoubles(FUNCTIONS["softplus"], lambda x: np.log1p(np.exp(x)))


def silu(x: F32) -> F32:
    """fl32(x * sigmoid(x))."""
    with np.errstate(all="ignore"):
        return np.asarray(x * sigmoid(x))
