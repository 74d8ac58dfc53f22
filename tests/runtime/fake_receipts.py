"""Receipts over FakePool: the demonstration model's folder without its weights, and a command's three results."""

import json
import shutil
from pathlib import Path
from typing import Any

import fake_pool
import pytest
from leafsum.ranks.tiny import ensure_tiny
from leafsum.runtime.commands.main import run
from leafsum.runtime.receipts import facts

ARMS = ("--tp", "1,2", "--exchange", "slots,nodes", "--placement", "contiguous,strided", "--max-tokens", "6")
NUM_GANGS = 1 + 1 + 4
"""The reference, all else at tp 1, and exchange x placement at tp 2."""

NUM_CONTROLS = 6 + 2
"""One of each, and the two that spoil a row once more, for the second exchange."""


def install(monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> fake_pool.Script:
    """Every model resolves to `model_dir`; returns the script that steers all pools."""
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(ensure_tiny() / name, model_dir)
    monkeypatch.setattr("leafsum.runtime.models.resolve_model", lambda _text: model_dir)
    # the hardware's facts come from leafsum._C, which these tests do not need
    monkeypatch.setattr(facts, "_instruction_set", lambda: "plain")
    return fake_pool.install(monkeypatch)


def receipt(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the receipt, and standard error of one run."""
    exit_code = run(["receipt", *ARMS, *arguments, "--json"])
    out, err = capfd.readouterr()
    return exit_code, json.loads(out), err
