"""Whole models of the families with DeltaNet, from their folders, bit for bit against the contract in tests/oracle."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract_runs import assert_bits_of_the_contract
from family_checkpoints import write_family
from model_runs import Row, whole
from numpy.typing import NDArray
from oracle.inputs import integers
from safetensors.numpy import load_file

END_ID = 1
PROMPT = integers("prompt", 2, 101, (70,)).tolist()
PROMPT[20], PROMPT[41], PROMPT[42] = END_ID, END_ID, END_ID

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "next": ("qwen3_next", "bfloat16", {"mlp_only_layers": [1], "norm_topk_prob": False}),
    "3_5": ("qwen3_5_moe", "float16", {"linear_num_value_heads": 6, "num_hidden_layers": 3}),
    "exp": ("qwen4_exp", "bfloat16", {"ple_layer_ids": [1, 2]}),
    "exp in float32": (
        "qwen4_exp",
        "float32",
        {"layer_types": ["linear_attention", "indexed_attention"], "num_hidden_layers": 2, "ple_layer_ids": [1]},
    ),
}


def chunks(num_rows: int) -> list[list[Row]]:
    """A prompt in two chunks and the rest row by row."""
    rows = whole([PROMPT])[0]
    return [rows[:29], rows[29:num_rows], *([row] for row in rows[num_rows:])]


@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_the_contract(tmp_path: Path, case: str) -> None:
    """Weights are stored in FP32, so that what is rounded at load, and what is not, shows."""
    family, dtype, changes = CASES[case]
    folder = write_family(tmp_path, family, whole_table=True, **changes)
    weights: dict[str, NDArray[np.float32]] = load_file(folder / "model.safetensors")
    assert_bits_of_the_contract(folder, weights, PROMPT, dtype, chunks(62))
