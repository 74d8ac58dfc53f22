"""What a model is: its sizes and options, the limits they have, and how ranks share it.

Imports no torch. A family is one reader in `configs`, the names of its tensors in `sizes`, and its wiring in `models`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..collectives.placement import contiguous_share
from ..errors import ConfigError
from .rope import RopeSpec

MAX_ATTENTION_LEAVES = 8
NUM_VOCAB_LEAVES = 64

MAX_LAYERS = 10_000
MAX_EXPERTS = 65_536
MAX_EXPERTS_IN_ALL = 2**18
"""Of all layers together, ten times the largest published. A checkpoint may name three tensors for each."""
MAX_HEADS = 65_536
MAX_HEAD_DIM = 65_536
"""Every pair of its elements has a frequency, computed with 60 digits."""
MAX_WIDTH = 2**24
MAX_VOCAB = 2**24
MAX_REACH = 64
"""Positions that a convolution, an n-gram or a block of keys may look back: each slot has a ring that holds them."""
MAX_STREAMS = 64
MAX_NGRAM_TABLES = 1024
"""Of all layers together, 64 times what is published. Each has a prime of its own, which must be found."""
MAX_NGRAM_BASE = 2**31

ATTENTION = "attention"
DELTANET = "deltanet"
"""Kinds of a layer's first block, as `ModelSpec.layer_kinds` names them."""


ROWS_PER_BORDER = 64
"""Of DeltaNet's state (docs/numerics.md, section 6)."""
ROLLBACK_ROWS = 64
"""A request may go back by so many rows, and go on from there.

Counted from the furthest position that it has come to, not from where it stands after going back before: two border
states of DeltaNet are kept, and rings hold no more rows. Position 0 can always be gone back to: there nothing is read.
"""


NUM_BORDER_STATES = 2
DELTANET_RING_ROWS = ROWS_PER_BORDER + ROLLBACK_ROWS


def num_ring_rows(num_rows: int) -> int:
    """Positions that a ring keeps, for a block that reads the last num_rows, its own included."""
    return num_rows + ROLLBACK_ROWS


def num_head_leaves(num_heads: int) -> int:
    """Leaves of a row-split projection: the largest power of two up to 8 that divides the heads."""
    num_leaves = MAX_ATTENTION_LEAVES
    while num_heads % num_leaves:
        num_leaves //= 2
    return num_leaves


def share_of_heads(num_heads: int, rank: int, num_ranks: int) -> range:
    """The heads a rank computes, those of its leaves; may be empty."""
    num_leaves = num_head_leaves(num_heads)
    leaves = contiguous_share(num_leaves, rank, num_ranks)
    heads_per_leaf = num_heads // num_leaves
    return range(leaves.start * heads_per_leaf, leaves.stop * heads_per_leaf)


@dataclass(frozen=True, slots=True)
class DeltaNetSpec:
    """Gated DeltaNet. `output_gate` "silu" or "sigmoid"; `fused_projections`: q, k, v and z lie by key head in one
    tensor (in_proj_qkvz), b and a in another (in_proj_ba), as qwen3_next publishes them."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_taps: int
    output_gate: str
    fused_projections: bool

    @property
    def num_leaves(self) -> int:
        return num_head_leaves(self.num_value_heads)

    @property
    def heads_per_key_head(self) -> int:
        return self.num_value_heads // self.num_key_heads

    def num_channels(self, num_key_heads: int, num_value_heads: int) -> int:
        """Of the convolution: q, k and v of so many heads."""
        return 2 * num_key_heads * self.key_dim + num_value_heads * self.value_dim

    def value_heads(self, rank: int, num_ranks: int) -> range:
        return share_of_heads(self.num_value_heads, rank, num_ranks)

    def key_heads(self, rank: int, num_ranks: int) -> range:
        """The key heads that a rank's value heads use. Several ranks may keep the same one."""
        heads = self.value_heads(rank, num_ranks)
        if not heads:
            return range(0)
        return range(heads.start // self.heads_per_key_head, (heads.stop - 1) // self.heads_per_key_head + 1)


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """Sparse attention: a row sees the `budget` keys of its best blocks of `block_size` positions, and the tail."""

    num_heads: int
    head_dim: int
    budget: int
    block_size: int


@dataclass(frozen=True, slots=True)
class HyperSpec:
    """Hyper-connections: `num_streams` residual streams side by side."""

    num_streams: int
    low_rank: int


@dataclass(frozen=True, slots=True)
class NgramSpec:
    """The n-gram embedding of some layers (zero-based, ascending). `vocab_base`: its heads' tables have the primes from
    there on; a layer's rows together are padded to a multiple of `divisor`."""

    layers: tuple[int, ...]
    embed_dim: int
    conv_taps: int
    ngram_size: int
    heads_per_ngram: int
    vocab_base: int
    divisor: int
    seed: int
    end_id: int

    @property
    def num_heads(self) -> int:
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def head_dim(self) -> int:
        """Elements of one head's row in its table."""
        return self.embed_dim // self.num_heads

    @property
    def conv_dilation(self) -> int:
        return self.ngram_size

    @property
    def conv_reach(self) -> int:
        """Positions that the convolution reads, the row's own included."""
        return (self.conv_taps - 1) * self.conv_dilation + 1


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes and options of one model. `dense_layers` are those with an MLP instead of experts.

    `layer_kinds`: each layer's first block, ATTENTION or DELTANET. `rotary_dim` elements of a head are rotated.
    `offset_norms`: norms store an offset from one. `query_gate`: queries have gates. `shared_width` 0: no shared
    expert. `tensor_prefix`: what the checkpoint's names of the text model begin with. None: no such block.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_bias: bool
    num_experts: int
    top_k: int
    renormalise: bool
    expert_width: int
    dense_width: int
    dense_layers: tuple[int, ...]
    rms_norm_eps: float
    tied_embeddings: bool
    rope: RopeSpec
    max_context: int
    eos_ids: tuple[int, ...]
    layer_kinds: tuple[str, ...]
    rotary_dim: int
    offset_norms: bool = False
    query_gate: bool = False
    shared_width: int = 0
    tensor_prefix: str = "model."
    deltanet: DeltaNetSpec | None = None
    indexer: IndexerSpec | None = None
    hyper: HyperSpec | None = None
    ngram: NgramSpec | None = None

    @property
    def num_attention_leaves(self) -> int:
        return num_head_leaves(self.num_heads)

    @property
    def num_streams(self) -> int:
        """Of the residual: several with hyper-connections."""
        return self.hyper.num_streams if self.hyper else 1

    @property
    def residual_size(self) -> int:
        """Elements of a residual row: all streams."""
        return self.hidden_size * self.num_streams

    def layers_of(self, kind: str) -> tuple[int, ...]:
        return tuple(layer for layer, each in enumerate(self.layer_kinds) if each == kind)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        return tuple(sorted(set(range(self.num_layers)).difference(self.dense_layers)))

    def heads(self, rank: int, num_ranks: int) -> range:
        """The query heads a rank computes; may be empty."""
        return share_of_heads(self.num_heads, rank, num_ranks)

    def kv_heads(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        """The KV heads a rank keeps: those its query heads read. Several ranks may keep the same one."""
        return tuple(sorted({self.kv_head_of(head) for head in self.heads(rank, num_ranks)}))

    def kv_head_of(self, head: int) -> int:
        return head // (self.num_heads // self.num_kv_heads)

    def vocab_range(self, rank: int, num_ranks: int) -> tuple[int, int]:
        """The ids first .. stop-1 whose logits a rank computes: whole leaves of the 64; may be empty."""
        leaves = contiguous_share(NUM_VOCAB_LEAVES, rank, num_ranks)
        first = leaves.start * self.vocab_size // NUM_VOCAB_LEAVES
        return first, leaves.stop * self.vocab_size // NUM_VOCAB_LEAVES


def check_num_ranks(spec: ModelSpec, num_ranks: int) -> None:
    """Raises ConfigError where ranks would outnumber the experts."""
    if not 1 <= num_ranks <= spec.num_experts:
        raise ConfigError(
            f"expected --tp from 1 to {spec.num_experts}, the number of experts of this model (an expert is never "
            f"split), got {num_ranks}"
        )
