"""What transformers makes of a prompt and of the tokens that it decodes greedily, in float64, and how near every row
came to another choice of experts or of keys.

A row whose router or indexer is nearly undecided in the reference may rightly choose otherwise in FP32, and whatever
attends to it follows. So a row is left out when, in any layer, its last chosen and first refused expert (block of
keys) differ by less than NEAR_TIE of the chosen one's probability (of the best score), and so are all later rows of
its prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

NEAR_TIE = 2e-5


@dataclass(frozen=True)
class Reference:
    """token_ids of the prompt and those decoded, the last of which was never read; logits float64 [rows, V], a row for
    each token that was read; gaps [rows]: the least relative gap of a row's choices."""

    token_ids: list[int]
    logits: NDArray[np.float64]
    gaps: NDArray[np.float64]

    def num_decided_rows(self, near_tie: float = NEAR_TIE) -> int:
        """Rows before the first near-tie."""
        near_ties = np.flatnonzero(self.gaps < near_tie)
        return int(near_ties[0]) if near_ties.size else len(self.gaps)


def load_reference(folder: Path, model_class: type[PreTrainedModel]) -> PreTrainedModel:
    model: PreTrainedModel = model_class.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    return model


def reference_run(model: PreTrainedModel, prompt: Sequence[int], num_decoded: int = 0) -> Reference:
    """The prompt as a whole, then a row at a time from the model's own memory; no end id stops it."""
    token_ids, logits, gaps = list(prompt), [], []
    num_indexers = list(getattr(model.config.get_text_config(), "layer_types", [])).count("indexed_attention")
    cache, read = None, 0
    for _ in range(num_decoded + 1):
        choices = ChoiceGaps(len(token_ids) - read, num_indexers)
        with torch.no_grad(), float64_everywhere(), choices.noted():
            output = model(torch.tensor([token_ids[read:]]), cache=cache, use_cache=True)
        cache, read = output.cache, len(token_ids)
        assert output.logits.dtype == torch.float64
        logits.append(output.logits[0])
        gaps.append(choices.of_rows())
        token_ids.append(int(logits[-1][-1].argmax()))
    return Reference(token_ids, torch.cat(logits).numpy(), torch.cat(gaps).numpy())


@contextmanager
def float64_everywhere() -> Iterator[None]:
    """transformers computes norms, softmax and DeltaNet in FP32 whatever the model's dtype; inside, FP64 stays FP64.

    Frequencies and angles of rotary stay FP32, as ours are.
    """
    cast, softmax = torch.Tensor.to, torch.nn.functional.softmax

    def float_(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.dtype == torch.float64 else cast(tensor, torch.float32)

    def to(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if tensor.dtype == torch.float64 and args[:1] == (torch.float32,):
            args = (torch.float64, *args[1:])
        return cast(tensor, *args, **options)

    def softmax_(values: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
        return softmax(values, dim=dim, dtype=values.dtype if values.dtype == torch.float64 else dtype)

    with (
        mock.patch.object(torch.Tensor, "float", float_),
        mock.patch.object(torch.Tensor, "to", to),
        mock.patch.object(torch.nn.functional, "softmax", softmax_),
    ):
        yield


class ChoiceGaps:
    """Notes every choice of largest values made inside: routers choose for all rows at once, indexers row by row.

    Of equal scores (which relu makes, at zero) an indexer's choice is unspecified in transformers; here the lower block
    wins, as with us, and two zeros are no near-tie.
    """

    def __init__(self, num_rows: int, num_indexers: int) -> None:
        self._num_indexers = num_indexers
        self._of_routers = torch.full((num_rows,), torch.inf, dtype=torch.float64)
        self._of_indexers: list[float] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        def topk(values: torch.Tensor, top_k: int, dim: int) -> Any:
            return self._choose(values, top_k, dim)

        with mock.patch.object(torch, "topk", topk), mock.patch.object(torch.Tensor, "topk", topk):
            yield

    def _choose(self, values: torch.Tensor, top_k: int, dim: int) -> Any:
        ordered = values.sort(dim=dim, descending=True, stable=True)
        gaps = torch.full(values.shape[:-1], torch.inf, dtype=torch.float64)
        if top_k < values.shape[-1]:
            last, refused = ordered.values[..., top_k - 1], ordered.values[..., top_k]
            best = ordered.values[..., 0] if values.ndim == 1 else last
            gaps = torch.where(last > 0, (last - refused).double() / best, gaps)
        if values.ndim == 1:
            self._of_indexers.append(float(gaps))
        else:
            self._of_routers = torch.minimum(self._of_routers, gaps)
        return torch.return_types.topk((ordered.values[..., :top_k], ordered.indices[..., :top_k]))

    def of_rows(self) -> torch.Tensor:
        """float64 [rows]. Every indexer chooses for the same rows: all but the first, which see no complete block."""
        gaps = self._of_routers.clone()
        if self._of_indexers:
            of_indexers = torch.tensor(self._of_indexers, dtype=torch.float64).view(self._num_indexers, -1).amin(dim=0)
            last_rows = gaps[-of_indexers.shape[0] :]
            torch.minimum(last_rows, of_indexers, out=last_rows)
        return gaps


@dataclass(frozen=True)
class Comparison:
    num_compared: int
    num_left_out: int
    worst: float


def compare(
    references: Sequence[Reference], logits: NDArray[np.float32], tolerance: float, near_tie: float = NEAR_TIE
) -> Comparison:
    """Holds the logits of a run, rows of one prompt after those of another, against the references: within `tolerance`
    of a prompt's largest logit. `worst` is the largest difference in these terms."""
    num_compared = first_row = 0
    worst = 0.0
    for reference in references:
        num_rows = reference.num_decided_rows(near_tie)
        expected, found = reference.logits[:num_rows], logits[first_row : first_row + num_rows]
        first_row += len(reference.logits)
        num_compared += num_rows
        scale = np.abs(reference.logits).max()
        errors = np.abs(found - expected).max(axis=1, initial=0.0) / scale
        wrong = np.flatnonzero(~(errors < tolerance))
        assert not wrong.size, (
            f"{wrong.size} of {num_rows} rows differ, the first is {wrong[0]}: by {errors[wrong[0]]:.2e} of the "
            f"largest logit, at worst {np.nanmax(errors):.2e}"
        )
        worst = max(worst, float(errors.max(initial=0.0)))
        _hold_best_ids(expected, found, 2 * tolerance * scale)
    assert first_row == len(logits)
    return Comparison(num_compared, first_row - num_compared, worst)


def _hold_best_ids(expected: NDArray[np.float64], found: NDArray[np.float32], margin: float) -> None:
    """The best id is the same wherever the reference's best two logits are further apart than `margin`."""
    best_two = np.sort(expected, axis=1)[:, -2:]
    is_clear = best_two[:, 1] - best_two[:, 0] > margin
    assert is_clear.size == 0 or is_clear.mean() > 0.9
    assert (found.argmax(axis=1) == expected.argmax(axis=1))[is_clear].all()
