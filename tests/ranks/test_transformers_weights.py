"""Every tensor of a checkpoint counts: one changed element of each kind moves our logits as it moves the reference's.

The element is the one that the reference's logits depend on most, so that no tensor is passed over by chance. An
indexer has no gradient, it only chooses: there a large change of one element makes other choices.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_checkpoints import FAMILIES, as_stored, model_class, write_family
from model_runs import run_single, whole
from reference_runs import compare, float64_everywhere, load_reference, reference_run
from safetensors.torch import load_file, save_file
from tiny_checkpoints import Tensors
from transformers import PreTrainedModel

TOLERANCE = 1e-4
LEAST_MOVE = 1e-2
"""Of the largest logit: what a changed element must move, a hundred times the tolerance."""

CHANGE = 1.5
CHANGE_OF_CHOICES = 12.0

PROMPT = np.random.default_rng(5).integers(101, size=16).tolist()
PROMPT[9] = 1  # an end id


OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"mlp_only_layers": [1]},
    "qwen3_5_moe": {"attention_bias": True},
    "qwen4_exp": {"indexer_budget": 8},
}


def kind_of(name: str) -> str:
    """A tensor's name without the numbers of layers, experts and shards."""
    return re.sub(r"(?<=[._])\d+(?=\.)", "*", name)


def most_telling_elements(model: PreTrainedModel) -> dict[str, tuple[str, int]]:
    """For each kind of tensor the stored name and flat index of the element with the steepest slope."""
    with float64_everywhere():
        logits = model(torch.tensor([PROMPT])).logits
    generator = torch.Generator().manual_seed(0)
    (logits * torch.randn(logits.shape, generator=generator, dtype=torch.float64)).sum().backward()
    slopes = {
        name: torch.zeros_like(each) if each.grad is None else each.grad for name, each in model.named_parameters()
    }
    steepest: dict[str, tuple[float, str, int]] = {}
    for name, slope in as_stored(slopes, model.config).items():
        found = float(slope.abs().max()), name, int(slope.abs().argmax())
        steepest[kind_of(name)] = max(found, steepest.get(kind_of(name), found))
    return {kind: (name, index) for kind, (_, name, index) in steepest.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_tensor_counts(tmp_path: Path, family: str) -> None:
    folder = write_family(tmp_path, family, 3, **OPTIONS[family])
    model = load_reference(folder, model_class(family, wrapped=False))
    reference, stored = reference_run(model, PROMPT), load_file(folder / "model.safetensors")
    in_memory = as_stored(dict(model.state_dict()), model.config)
    for kind, (name, index) in most_telling_elements(model).items():
        change = CHANGE_OF_CHOICES if ".indexer." in name else CHANGE
        for tensors in (stored, in_memory):
            _element(tensors, name, index).add_(change)
        save_file(stored, folder / "model.safetensors")
        changed = reference_run(model, PROMPT)
        moved = np.abs(changed.logits - reference.logits)[: changed.num_decided_rows()].max(initial=0.0)
        assert moved > LEAST_MOVE * np.abs(reference.logits).max(), f"{kind} moves the reference too little"
        run = run_single(folder, [PROMPT], whole([PROMPT]), "float32")
        try:
            compare([changed], run.logits, TOLERANCE)
        except AssertionError as error:
            raise AssertionError(f"with a changed element of {kind}: {error}") from error
        for tensors in (stored, in_memory):
            _element(tensors, name, index).sub_(change)


def _element(tensors: Tensors, name: str, index: int) -> torch.Tensor:
    """A view; a tensor of a model in memory may be part of a larger one."""
    place = np.unravel_index(index, tensors[name].shape)
    return tensors[name][tuple(int(each) for each in place)]
