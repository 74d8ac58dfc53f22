"""Rotary frequencies: every number is the exact (scaled) value, rounded once to FP32 (docs/numerics.md section 1).

Exact values are decimals of 60 digits, so that no double stands between them and their FP32 rounding.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext
from fractions import Fraction

from .json_fields import JsonFields

DIGITS = 60
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
FP32_FRACTION_BITS = 23
FP32_MIN_EXPONENT = -126
FP32_MAX = float(2**128 - 2**104)

MAX_POSITIONS = 2**29
"""Below it, a position times an FP32 frequency is exact in double, so that the angle is rounded once."""
MIN_FACTOR = 2.0**-64
"""A frequency is at most 1 / factor; angles stay finite in FP32."""

KNOWN_KINDS = ("default", "linear", "yarn")
KEYS = {
    "default": {"rope_theta", "rope_type", "type", "partial_rotary_factor"},
    "linear": {"rope_theta", "rope_type", "type", "partial_rotary_factor", "factor"},
    "yarn": {
        "rope_theta", "rope_type", "type", "partial_rotary_factor", "factor", "original_max_position_embeddings",
        "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Base and scaling of the rotary embedding; the fields below `factor` are YaRN's alone."""

    kind: str
    theta: float
    factor: float = 1.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None


def read_rope(config: JsonFields, keys_without_effect: Collection[str] = ()) -> RopeSpec:
    """From `rope_parameters`, or `rope_theta` beside `rope_scaling`. Raises ModelError for kinds and keys not known.

    How much of a head is rotated says `read_rotary_dim`.
    """
    scaling = _scaling_fields(config)
    kind_key = "rope_type" if scaling.has("rope_type") else "type"
    kind = scaling.text(kind_key, "default")
    if kind not in KNOWN_KINDS:
        raise scaling.unsupported(kind_key, ", ".join(KNOWN_KINDS))
    for name in scaling.values:
        if name not in KEYS[kind].union(keys_without_effect) and scaling.has(name):
            raise scaling.unsupported(name, f"with type {kind}: {', '.join(sorted(KEYS[kind]))}")
    theta = scaling.number("rope_theta", config.number("rope_theta", 10000.0))
    if theta <= 1:
        raise scaling.wrong("rope_theta", "a number above one")
    if kind == "default":
        return RopeSpec(kind, theta)
    if kind == "linear":
        return RopeSpec(kind, theta, _factor(scaling))
    return _read_yarn(config, scaling, theta)


def read_rotary_dim(config: JsonFields, head_dim: int, default_factor: float) -> int:
    """Elements of a head that are rotated: `partial_rotary_factor` of them, rounded down. Raises ModelError."""
    scaling = _scaling_fields(config)
    fields = scaling if scaling.has("partial_rotary_factor") else config
    factor = fields.number("partial_rotary_factor", default_factor)
    rotary_dim = int(head_dim * min(factor, 2.0))
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise fields.wrong(
            "partial_rotary_factor",
            f"a share of head_dim = {head_dim} that is even (rotary pairs) and at least 2",
        )
    return rotary_dim


def refuse_partial_rotary(config: JsonFields) -> None:
    """For families that rotate whole heads."""
    for fields in (config, _scaling_fields(config)):
        if fields.number("partial_rotary_factor", 1.0) != 1.0:
            raise fields.unsupported("partial_rotary_factor", "1.0")


def _scaling_fields(config: JsonFields) -> JsonFields:
    for name in ("rope_scaling", "rope_parameters"):
        fields = config.fields(name)
        if fields is not None and fields.values:
            return fields
    return JsonFields(config.path, {}, "rope_parameters.")


def _read_yarn(config: JsonFields, scaling: JsonFields, theta: float) -> RopeSpec:
    positions = config.integer("max_position_embeddings", maximum=MAX_POSITIONS)
    original = scaling.integer("original_max_position_embeddings", positions, maximum=MAX_POSITIONS)

    def optional(name: str) -> float | None:
        return scaling.number(name) if scaling.has(name) else None

    rope = RopeSpec(
        kind="yarn",
        theta=theta,
        factor=_factor(scaling),
        original_max_positions=original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=scaling.boolean("truncate", True),
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
    )
    if attention_factor(rope) > FP32_MAX:
        raise scaling.wrong("mscale", "an attention factor that is finite in FP32")
    return rope


def _factor(scaling: JsonFields) -> float:
    factor = scaling.number("factor")
    if factor < MIN_FACTOR:
        raise scaling.wrong("factor", f"a number of at least {MIN_FACTOR:.1e}")
    return factor


def round_to_fp32(exact: Decimal | Fraction) -> float:
    """Nearest FP32 value, ties to even, subnormals kept, as a Python float that holds it."""
    value = Fraction(exact)
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, FP32_MIN_EXPONENT) - FP32_FRACTION_BITS)
    return float(round(value / unit) * unit)


def inverse_sqrt(size: int) -> float:
    """size^-0.5, rounded once to FP32."""
    with localcontext(prec=DIGITS):
        return round_to_fp32(1 / Decimal(size).sqrt())


def frequencies(rope: RopeSpec, rotary_dim: int) -> list[float]:
    """FP32 values [rotary_dim / 2]: theta^(-2i / rotary_dim), divided by the factor (linear) or scaled (YaRN)."""
    with localcontext(prec=DIGITS):
        log_theta = Decimal(rope.theta).ln()
        plain = [(-2 * i * log_theta / rotary_dim).exp() for i in range(rotary_dim // 2)]
        if rope.kind == "linear":
            plain = [frequency / Decimal(rope.factor) for frequency in plain]
        if rope.kind == "yarn":
            plain = _yarn_frequencies(rope, rotary_dim, plain)
        return [round_to_fp32(frequency) for frequency in plain]


def _yarn_frequencies(rope: RopeSpec, rotary_dim: int, plain: list[Decimal]) -> list[Decimal]:
    """YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.2), with the published parameters' meaning.

    The frequency that turns n times over the original context has index d(n). Below d(beta_fast) frequencies stay,
    above d(beta_slow) they are divided by the factor, and between them a linear ramp over the index blends the two.
    """
    log_theta = Decimal(rope.theta).ln()

    def index_of(num_turns: float) -> Decimal:
        ratio = Decimal(rope.original_max_positions) / (Decimal(num_turns) * 2 * PI)
        return rotary_dim * ratio.ln() / (2 * log_theta)

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        low, high = low.to_integral_value(ROUND_FLOOR), high.to_integral_value(ROUND_CEILING)
    low, high = max(low, Decimal(0)), min(high, Decimal(rotary_dim - 1))
    width = high - low if high != low else Decimal("0.001")
    blended = []
    for i, frequency in enumerate(plain):
        ramp = min(max((i - low) / width, Decimal(0)), Decimal(1))
        blended.append(frequency * (1 - ramp) + frequency / Decimal(rope.factor) * ramp)
    return blended


def attention_factor(rope: RopeSpec) -> float:
    """What cos and sin are multiplied by, rounded once; 1.0 unless YaRN: 0.1 * mscale * ln(factor) + 1."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return round_to_fp32(Fraction(rope.attention_factor))

    def magnitude(mscale: float) -> Decimal:
        if rope.factor <= 1:
            return Decimal(1)
        return Decimal("0.1") * Decimal(mscale) * Decimal(rope.factor).ln() + 1

    with localcontext(prec=DIGITS):
        if rope.mscale and rope.mscale_all_dim:
            return round_to_fp32(magnitude(rope.mscale) / magnitude(rope.mscale_all_dim))
        return round_to_fp32(magnitude(1.0))
