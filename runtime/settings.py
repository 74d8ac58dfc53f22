"""Settings: one frozen dataclass that flags, LEAFSUM_* variables and constructor arguments all fill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..collectives.control_names import CONTROLS, NO_CONTROL
from ..collectives.placement import NAME_PATTERN, NAMES
from ..errors import ConfigError
from ..ranks.numerics import settings_digest
from .settings_rules import Rule, nearest_hint

PREFIX = "LEAFSUM_"


def _setting(default: str | int | float | bool, help: str, **rule: Any) -> Any:
    return field(default=default, metadata={"rule": Rule(type(default), help, **rule)})


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a pool can be told. Construction refuses wrong values with ConfigError.

    A setting is numeric (the bits of the tokens may depend on it, so it enters the digest) or it keeps bits.
    """

    model: str = _setting(
        "tiny",
        "Model folder, tiny (the built-in demonstration model), or a hub id.",
        metavar="DIR|tiny|HUB-ID",
        has_own_digest=True,
    )
    device: str = _setting(
        "cpu",
        "Where the ranks compute; this version has cpu.",
        numeric=True,
        choices=("cpu", "cuda"),
        metavar="cpu|cuda",
    )
    tp: int = _setting(1, "Number of rank processes that share the model.", at_least=1, at_most=4096, metavar="N")
    dtype: str = _setting(
        "bfloat16",
        "Compute dtype.",
        numeric=True,
        choices=("bfloat16", "float16", "float32"),
        metavar="bfloat16|float16|float32",
    )
    exchange: str = _setting(
        "auto",
        "What travels between ranks: rows of chosen slots, roots of whole subtrees, or whichever are fewer rows.",
        choices=("auto", "slots", "nodes"),
        metavar="auto|slots|nodes",
    )
    placement: str = _setting(
        "contiguous",
        "Which rank owns which expert.",
        choices=NAMES,
        pattern=NAME_PATTERN,
        metavar="contiguous|strided|random[:SEED]",
    )
    prefill_chunk: int = _setting(
        512,
        "Most prompt tokens in one step; whole (or 0) never cuts a prompt.",
        at_most=1 << 30,
        words={"whole": 0},
        metavar="N|whole",
    )
    concurrency: int = _setting(16, "Most requests computed at once.", at_least=1, at_most=4096, metavar="N")
    max_context: int = _setting(
        0,
        "Most tokens of prompt and output together; 0 = the model's, cut to --kv-tokens.",
        at_most=1 << 29,
        metavar="N",
    )
    kv_tokens: int = _setting(
        32768, "Tokens that the KV pages of a rank hold.", at_least=1, at_most=1 << 28, metavar="N"
    )
    page_size: int = _setting(64, "Tokens in one KV page.", at_least=1, at_most=4096, metavar="N")
    threads: int = _setting(0, "Compute threads of a rank; 0 = cores / tp, at least 1.", at_most=1024, metavar="N")
    queue_limit: int = _setting(
        1024,
        "Most requests a pool holds, running and waiting; of a longer list the rest waits in its caller.",
        at_least=1,
        at_most=1 << 20,
        metavar="N",
    )
    recover: str = _setting(
        "same",
        "A lost gang is started again: with as many ranks, with fewer where as many cannot be had, or not at all.",
        choices=("same", "shrink", "never"),
        metavar="same|shrink|never",
    )
    recover_limit: int = _setting(
        5, "Most starts of a new gang within --recover-window-s.", at_least=1, at_most=1 << 20, metavar="N"
    )
    recover_window_s: float = _setting(
        600.0, "The time that --recover-limit is about.", at_least=0.001, at_most=1e9, metavar="SECONDS"
    )
    transport: str = _setting(
        "shared",
        "How rows travel between ranks of one host: memory that they share, or Gloo over loopback.",
        choices=("shared", "gloo"),
        metavar="shared|gloo",
    )
    digests: bool = _setting(False, "Also hash the FP32 logits of every decided token.")
    layer_digests: bool = _setting(False, "Also hash the residual of every row after every layer.")
    control: str = _setting(
        NO_CONTROL,
        "A sum that is wrong on purpose, which a receipt must tell from the right one.",
        numeric=True,
        choices=(NO_CONTROL, *CONTROLS),
        for_receipts=True,
    )
    poison: bool = _setting(False, "Fill all memory that must not be read with NaN.", for_receipts=True)
    hazards: bool = _setting(
        False, "Count ties across ranks, subnormals and negative zeros in what is exchanged.", for_receipts=True
    )
    delay_seed: int = _setting(
        0, "Random delays of every rank before every exchange; 0 = none.", at_most=(1 << 31) - 1, for_receipts=True
    )
    log_level: str = _setting(
        "warning",
        "What the processes log to standard error.",
        choices=("debug", "info", "warning", "error"),
        metavar="debug|info|warning|error",
    )
    start_timeout_s: float = _setting(
        300.0, "Longest wait for all ranks to be ready.", at_least=0.001, at_most=1e6, metavar="SECONDS"
    )
    step_timeout_s: float = _setting(
        300.0, "Longest wait for one step.", at_least=0.001, at_most=1e6, metavar="SECONDS"
    )

    def __post_init__(self) -> None:
        for name, rule in RULES.items():
            object.__setattr__(self, name, rule.check(getattr(self, name), name))
        if self.device == "cuda":
            raise ConfigError("device: 'cuda' is not in this version, which computes on the CPU only; use device 'cpu'")
        if self.page_size > self.kv_tokens:
            raise ConfigError(f"page_size: expected at most kv_tokens = {self.kv_tokens}, found {self.page_size}")

    @classmethod
    def resolve(cls, flags: Mapping[str, object], environ: Mapping[str, str]) -> Settings:
        """A flag over its LEAFSUM_* variable over the default. A flag is named as its field; None means not given."""
        refuse_unknown_variables(environ)
        refuse_unknown_fields(flags)
        values: dict[str, Any] = {}
        for name, rule in RULES.items():
            if flags.get(name) is not None:
                values[name] = rule.read(flags[name], flag_of(name))
            elif not rule.for_receipts and variable_of(name) in environ:
                values[name] = rule.read(environ[variable_of(name)], variable_of(name))
        return cls(**values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Settings:
        """Typed values by field name; an unknown name is a ConfigError that names the nearest."""
        refuse_unknown_fields(values)
        return cls(**values)

    def to_dict(self) -> dict[str, str | int | float | bool]:
        return {name: getattr(self, name) for name in RULES}

    def digest(self) -> str:
        """SHA-256 (hex) over the numeric settings and the version of the numeric contract."""
        return settings_digest({name: getattr(self, name) for name, rule in RULES.items() if rule.numeric})


RULES: dict[str, Rule] = {entry.name: entry.metadata["rule"] for entry in fields(Settings)}
"""Rule of every setting, in the order of the fields."""


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    return PREFIX + name.upper()


def refuse_unknown_fields(values: Mapping[str, object]) -> None:
    for name in values:
        if name not in RULES:
            raise ConfigError(f"{name}: no such setting; {nearest_hint(name, RULES)}")


def refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    known = {variable_of(name) for name, rule in RULES.items() if not rule.for_receipts}
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in known:
            hint = nearest_hint(variable, known, shared_prefix=PREFIX)
            raise ConfigError(f"{variable}: no such variable; {hint}; unset or rename it")
