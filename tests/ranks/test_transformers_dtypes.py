"""16-bit weights and compute dtypes: within their rounding of what transformers makes of the same weights in float64.

Where every expert is chosen and every key seen, all rows are compared; elsewhere those before the first choice that
16-bit rounding could turn.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_checkpoints import FAMILIES, model_class, write_family
from model_runs import run_single, whole
from numpy.typing import NDArray
from reference_runs import Reference, load_reference, reference_run

ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
FP32_ROUNDING = 2.0**-24

ROUNDINGS_ON_THE_WAY = 25
"""About so many stand between a token and its logits: inputs of linears, q, k, v and p of attention, q and k of
DeltaNet, in each of three layers, and the head's input. They are independent: errors add up as the root of their
number."""

NEAR_TIE = 0.1
"""Router logits and index scores of the order of one are a few roundings off, some percent."""

NO_CHOICE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 6}
FEW_CHOICES: dict[str, Any] = {"num_experts": 3, "num_experts_per_tok": 2}
DENSE = {"indexer_budget": 256}
SPARSE = {"indexer_budget": 8}


def relative_errors(references: list[Reference], logits: NDArray[np.float32], near_tie: float) -> NDArray[np.float64]:
    """Root mean square of each compared row's error, over that of its prompt's logits."""
    errors, first_row = [], 0
    for reference in references:
        num_rows = reference.num_decided_rows(near_tie)
        differences = logits[first_row : first_row + num_rows] - reference.logits[:num_rows]
        errors.append(_rms(differences) / np.sqrt(np.mean(reference.logits**2)))
        first_row += len(reference.logits)
    return np.concatenate(errors)


def _rms(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    root: NDArray[np.float64] = np.sqrt(np.mean(rows**2, axis=1))
    return root


def hold_within_rounding(folder: Path, family: str, dtype: str, prompt_lengths: list[int], near_tie: float) -> int:
    """The number of rows compared that chose anything."""
    generator = np.random.default_rng(4)
    prompts = [generator.integers(101, size=length).tolist() for length in prompt_lengths]
    model = load_reference(folder, model_class(family, wrapped=False))
    references = [reference_run(model, prompt) for prompt in prompts]
    rounded, exact = (
        relative_errors(references, run_single(folder, prompts, whole(prompts), each).logits, near_tie)
        for each in (dtype, "float32")
    )
    expected = ROUNDING[dtype] * ROUNDINGS_ON_THE_WAY**0.5
    assert expected / 50 < np.median(rounded) < expected
    # What enlarges a rounding on its way, a norm of a small value say, enlarges those of both dtypes alike.
    assert rounded.max() < ROUNDING[dtype] / FP32_ROUNDING * exact.max()
    return sum(int(np.isfinite(each.gaps[: each.num_decided_rows(near_tie)]).sum()) for each in references)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("family", FAMILIES)
def test_without_choices_every_row_is_within_rounding(tmp_path: Path, family: str, dtype: str) -> None:
    changes = NO_CHOICE | (DENSE if family == "qwen4_exp" else {})
    folder = write_family(tmp_path, family, 1, dtype, **changes)
    assert hold_within_rounding(folder, family, dtype, [40, 9, 3], near_tie=0.0) == 0


@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen3_next", FEW_CHOICES), ("qwen3_5_moe", FEW_CHOICES), ("qwen4_exp", FEW_CHOICES | DENSE),
     ("qwen4_exp", NO_CHOICE | SPARSE)],
    ids=["qwen3_next", "qwen3_5_moe", "qwen4_exp_experts", "qwen4_exp_keys"],
)  # fmt: skip
def test_clear_choices_are_those_of_the_reference(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    folder = write_family(tmp_path, family, 2, "bfloat16", **changes)
    lengths = [20] * 8 if changes["num_experts_per_tok"] == changes["num_experts"] else [6] * 20
    assert hold_within_rounding(folder, family, "bfloat16", lengths, NEAR_TIE) >= 20
