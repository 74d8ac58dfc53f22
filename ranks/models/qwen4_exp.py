"""The family qwen4_exp (Flash Next): blocks read from and write to several residual streams; n-grams join them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import ops
from ..blocks.dense import DenseMLP
from ..blocks.experts import Experts
from ..blocks.hyper import Mixer
from ..blocks.ngram import NgramEmbedding
from ..blocks.row_split import SplitHeads
from ..memory import BlockMemory, MemorySizes
from ..rows import StepRows
from ..spec import HyperSpec
from .decoder import Family, FinalNorm, Parts


@dataclass(frozen=True, slots=True)
class HyperLayer:
    """`ngram` is None on layers without."""

    ngram: NgramEmbedding | None
    token_mixer_input: Mixer
    token_mixer: SplitHeads
    mlp_input: Mixer
    mlp: DenseMLP | Experts

    def allocate(self, sizes: MemorySizes) -> list[BlockMemory]:
        of_ngram = [self.ngram.allocate(sizes)] if self.ngram is not None else []
        return [*of_ngram, *self.token_mixer.allocate(sizes)]

    def __call__(self, streams: torch.Tensor, rows: StepRows) -> torch.Tensor:
        if self.ngram is not None:
            streams = self.ngram(streams, rows)
        x, weights = self.token_mixer_input(streams)
        streams = ops.hyper_write(streams, self.token_mixer(x, rows), weights)
        x, weights = self.mlp_input(streams)
        return ops.hyper_write(streams, self.mlp(x), weights)


def load_layer(parts: Parts, layer: int) -> HyperLayer:
    weights, spec, hyper = parts.layer_weights(layer), parts.spec, hyper_of(parts)
    ngram = None
    if spec.ngram is not None and layer in spec.ngram.layers:
        ngram = NgramEmbedding.load(weights.under("ple."), spec, spec.ngram, hyper, spec.ngram.layers.index(layer))
    return HyperLayer(
        ngram=ngram,
        token_mixer_input=Mixer.load(weights.under("attn_hyper_connection."), spec, hyper, with_injection=True),
        token_mixer=parts.token_mixer(layer),
        mlp_input=Mixer.load(weights.under("mlp_hyper_connection."), spec, hyper, with_injection=True),
        mlp=parts.mlp(layer),
    )


def load_final_norm(parts: Parts) -> FinalNorm:
    weights = parts.weights.under("hyper_connection_mixer.")
    mixer = Mixer.load(weights, parts.spec, hyper_of(parts), with_injection=False)
    return lambda streams: mixer(streams)[0]


def hyper_of(parts: Parts) -> HyperSpec:
    assert parts.spec.hyper is not None, "the reader of this family's config always sets it"
    return parts.spec.hyper


QWEN4_EXP = Family(load_layer, load_final_norm)
