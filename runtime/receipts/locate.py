"""Where two runs of one prompt part: the first token, and the first position and layer of the residual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .. import layer_hashes
from ..sampling import Completion


@dataclass(frozen=True, slots=True)
class Place:
    """A row of one prompt, by position, and the first layer (from 0) whose residual differs there."""

    position: int
    layer: int
    in_prompt: bool

    def __str__(self) -> str:
        return f"position {self.position}, layer {self.layer}, in the {'prompt' if self.in_prompt else 'output'}"


def first_place(mine: Completion, theirs: Completion) -> Place | None:
    """The first position at which a layer's residual differs; None where there is none, or no layer was hashed."""
    layers = num_layers(mine)
    if layers == 0 or layers != num_layers(theirs):
        return None
    place = layer_hashes.first_difference(mine.layer_hashes, theirs.layer_hashes, layers)
    if place is None:
        return None
    position, layer = place
    return Place(position, layer, position < len(mine.prompt_token_ids))


def num_rows(completion: Completion) -> int:
    """Rows that a finished request was computed in: its prompt's, and one for each token but the last."""
    return len(completion.prompt_token_ids) + len(completion.token_ids) - 1


def num_layers(completion: Completion) -> int:
    return layer_hashes.num_layers_of(completion.layer_hashes, num_rows(completion))


def first_difference(mine: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first token that differs, or where the shorter ends; None for equal sequences."""
    for index, (left, right) in enumerate(zip(mine, theirs, strict=False)):
        if left != right:
            return index
    return None if len(mine) == len(theirs) else min(len(mine), len(theirs))
