"""Settings: flags over variables over defaults, and every wrong word refused by name."""

import dataclasses
import subprocess
import sys

import pytest
from leafsum.errors import ConfigError
from leafsum.runtime.settings import RULES, Settings, flag_of, variable_of


def test_flag_wins_over_variable_wins_over_default():
    environ = {"LEAFSUM_TP": "3", "LEAFSUM_KV_TOKENS": "4096"}
    settings = Settings.resolve({"tp": "2", "kv_tokens": None}, environ)
    assert (settings.tp, settings.kv_tokens, settings.page_size) == (2, 4096, 64)


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if not rule.for_receipts])
def test_every_setting_is_read_from_its_variable(name):
    default = getattr(Settings(), name)
    text, value = {
        "device": ("cpu", "cpu"),
        "model": ("folder", "folder"),
        "dtype": ("float32", "float32"),
        "exchange": ("nodes", "nodes"),
        "placement": ("random:7", "random:7"),
        "log_level": ("debug", "debug"),
        "digests": ("yes", True),
        "layer_digests": ("on", True),
        "transport": ("gloo", "gloo"),
        "recover": ("shrink", "shrink"),
        "kv_tokens": ("128", 128),
    }.get(name, ("5", type(default)(5)))
    assert getattr(Settings.resolve({}, {variable_of(name): text}), name) == value


@pytest.mark.parametrize(
    ("flags", "environ", "text"),
    [
        ({}, {"LEAFSUM_THREAD": "1"}, r"LEAFSUM_THREAD: no such variable; did you mean LEAFSUM_THREADS\?"),
        ({}, {"LEAFSUM_QQ": "1"}, "LEAFSUM_QQ: no such variable; known are LEAFSUM_CONCURRENCY"),
        ({}, {"LEAFSUM_TP": "two"}, "LEAFSUM_TP: expected an integer of at least 1 and at most 4,096, found 'two'"),
        ({}, {"LEAFSUM_TP": ""}, "LEAFSUM_TP: expected an integer of at least 1"),
        ({"tp": "0"}, {}, "--tp: expected an integer of at least 1 and at most 4,096, found 0"),
        ({"tp": "1_0"}, {}, "--tp: expected an integer"),
        ({"tp": "2.0"}, {}, "--tp: expected an integer"),
        ({"tp": "\N{ARABIC-INDIC DIGIT TWO}"}, {}, "--tp: expected an integer"),
        ({"threads": "-1"}, {}, "--threads: expected an integer of at least 0"),
        (
            {"exchange": "node"},
            {},
            r"--exchange: expected one of auto, slots, nodes, found 'node'; did you mean nodes\?",
        ),
        ({"placement": "stride"}, {}, r"--placement: .* found 'stride'; did you mean strided\?"),
        ({"placement": "random:x"}, {}, "--placement: expected one of contiguous, strided, random, random:SEED"),
        ({"dtype": "bf16"}, {}, "--dtype: expected one of bfloat16, float16, float32, found 'bf16'"),
        ({"prefill_chunk": "hole"}, {}, r"--prefill-chunk: .* or whole, found 'hole'; did you mean whole\?"),
        ({"step_timeout_s": "nan"}, {}, "--step-timeout-s: expected a number of seconds"),
        ({"step_timeout_s": "inf"}, {}, "--step-timeout-s: expected a number of seconds"),
        ({"digests": "maybe"}, {}, "--digests: expected one of 1, true"),
        ({"model": ""}, {}, "--model: expected a text that is not empty"),
        ({"device": "cuda"}, {}, "device: 'cuda' is not in this version"),
        ({"tensor_parallel": "2"}, {}, "tensor_parallel: no such setting"),
        ({"kv_tokens": "8"}, {}, "page_size: expected at most kv_tokens = 8, found 64"),
    ],
)
def test_wrong_words_are_refused_with_what_was_expected_and_found(flags, environ, text):
    with pytest.raises(ConfigError, match=text):
        Settings.resolve(flags, environ)


@pytest.mark.parametrize("fields", [{"tp": "2"}, {"tp": True}, {"tp": 2.0}, {"digests": 1}, {"model": None}])
def test_arguments_are_typed(fields):
    with pytest.raises(ConfigError, match="expected"):
        Settings(**fields)


@pytest.mark.parametrize("name", ["control", "poison", "hazards", "delay_seed"])
def test_what_only_receipts_set_is_no_variable(name):
    with pytest.raises(ConfigError, match=f"{variable_of(name)}: no such variable"):
        Settings.resolve({}, {variable_of(name): "1"})


def test_other_programs_variables_are_left_alone():
    assert Settings.resolve({}, {"PATH": "/bin", "MYLEAFSUM_TP": "x"}) == Settings()


def test_whole_is_a_chunk():
    assert Settings.resolve({"prefill_chunk": "whole"}, {}).prefill_chunk == 0


def test_only_numeric_settings_and_the_numerics_version_enter_the_digest(monkeypatch):
    digest = Settings().digest()
    assert digest == "495306fb8a36d5b8be59ac141c70f1e7f38906fe81bea0349286296e3e00b3d0"
    assert len({digest, Settings(dtype="float32").digest(), Settings(control="rank-chain").digest()}) == 3
    keeps_bits = {
        "tp": 3,
        "exchange": "slots",
        "placement": "strided",
        "threads": 2,
        "prefill_chunk": 7,
        "page_size": 16,
        "transport": "gloo",
        "recover": "never",
        "queue_limit": 3,
        "layer_digests": True,
        "poison": True,
        "hazards": True,
        "delay_seed": 3,
    }
    assert Settings(**keeps_bits, concurrency=2, kv_tokens=512, digests=True, model="x").digest() == digest
    monkeypatch.setattr("leafsum.ranks.numerics.NUMERICS_VERSION", 2)
    assert Settings().digest() != digest


def test_dict_round_trip_and_unknown_names():
    settings = Settings(tp=2, placement="random:3", step_timeout_s=1.5)
    assert Settings.from_dict(settings.to_dict()) == settings
    with pytest.raises(ConfigError, match=r"treads: no such setting; did you mean threads\?"):
        Settings.from_dict({"treads": 1})


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().tp = 2  # type: ignore[misc]


def test_every_rule_says_what_it_means_for_bits():
    assert {name for name, rule in RULES.items() if rule.numeric} == {"device", "dtype", "control"}
    assert RULES["model"].bits == "has its own digest"
    assert all(rule.help.endswith(".") for rule in RULES.values())
    assert flag_of("kv_tokens") == "--kv-tokens"


def test_settings_import_nothing_heavy():
    names = ("torch", "numpy", "rich", "click")
    code = f"import sys, leafsum.runtime.settings; print([m for m in {names} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
