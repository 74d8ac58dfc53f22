"""What a model is: the sizes and options of its published config.json, and how ranks share it.

Imports no torch. A family is one reader here, the names of its tensors in `sizes`, and its wiring in `models`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..collectives.placement import contiguous_share
from ..errors import ConfigError, ModelError
from .json_fields import JsonFields, is_regular_file
from .rope import MAX_POSITIONS, RopeSpec, read_rope

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


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes and options of one model. `dense_layers` are those with an MLP instead of experts."""

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

    @property
    def num_attention_leaves(self) -> int:
        """Leaves of the output projection: the largest power of two up to 8 that divides the heads."""
        num_leaves = MAX_ATTENTION_LEAVES
        while self.num_heads % num_leaves:
            num_leaves //= 2
        return num_leaves

    @property
    def expert_layers(self) -> tuple[int, ...]:
        return tuple(sorted(set(range(self.num_layers)).difference(self.dense_layers)))

    def attention_leaves(self, rank: int, num_ranks: int) -> range:
        return contiguous_share(self.num_attention_leaves, rank, num_ranks)

    def heads(self, rank: int, num_ranks: int) -> range:
        """The query heads a rank computes; may be empty."""
        leaves = self.attention_leaves(rank, num_ranks)
        heads_per_leaf = self.num_heads // self.num_attention_leaves
        return range(leaves.start * heads_per_leaf, leaves.stop * heads_per_leaf)

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


def load_spec(model_dir: Path) -> ModelSpec:
    """Read config.json and generation_config.json. Raises ModelError that names the folder, field or family."""
    if not model_dir.is_dir():
        raise ModelError(
            f"expected a model folder, found {_what_is(model_dir)} at {model_dir}. Give the folder with config.json"
        )
    if not (model_dir / "config.json").is_file():
        raise ModelError(f"expected config.json in {model_dir}, it is not there. Give the folder of a whole model")
    config = JsonFields.read(model_dir / "config.json")
    family = config.text("model_type")
    if family not in FAMILIES:
        raise ModelError(
            f"{config.path}: model_type {family!r} is not a known family; known: {', '.join(sorted(FAMILIES))}"
        )
    eos_fields = _eos_fields(config)
    spec = FAMILIES[family](config, eos_fields.integers("eos_token_id"))
    if any(eos_id >= spec.vocab_size for eos_id in spec.eos_ids):
        raise eos_fields.wrong("eos_token_id", f"ids below vocab_size = {spec.vocab_size}")
    return spec


def _what_is(path: Path) -> str:
    return "a file" if path.exists() else "nothing"


def _eos_fields(config: JsonFields) -> JsonFields:
    """Where the ids that end a text are: generation_config.json if it has any, else config.json."""
    generation_path = config.path.parent / "generation_config.json"
    if is_regular_file(generation_path):
        generation = JsonFields.read(generation_path)
        if generation.has("eos_token_id"):
            return generation
    return config


def _read_qwen3_moe(config: JsonFields, eos_ids: tuple[int, ...]) -> ModelSpec:
    """Fields as published with transformers' Qwen3MoeConfig, of versions 4 and 5."""
    _refuse_options(config)
    hidden_size = config.integer("hidden_size", maximum=MAX_WIDTH)
    num_layers = config.integer("num_hidden_layers", maximum=MAX_LAYERS)
    num_heads = config.integer("num_attention_heads", maximum=MAX_HEADS)
    num_kv_heads = config.integer("num_key_value_heads", maximum=MAX_HEADS)
    if num_heads % num_kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of num_attention_heads = {num_heads}")
    num_experts = _num_experts(config)
    top_k = config.integer("num_experts_per_tok", maximum=MAX_EXPERTS)
    if top_k > num_experts:
        raise config.wrong("num_experts_per_tok", f"at most the number of experts, {num_experts}")
    dense_layers = _dense_layers(config, num_layers)
    if (num_layers - len(dense_layers)) * num_experts > MAX_EXPERTS_IN_ALL:
        most = f"at most {MAX_EXPERTS_IN_ALL:,} experts in all, so {MAX_EXPERTS_IN_ALL // num_experts:,} layers with"
        raise config.wrong("num_hidden_layers", f"{most} {num_experts:,} experts")
    return ModelSpec(
        family="qwen3_moe",
        vocab_size=config.integer("vocab_size", maximum=MAX_VOCAB),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(config, hidden_size, num_heads),
        attention_bias=config.boolean("attention_bias", False),
        num_experts=num_experts,
        top_k=top_k,
        renormalise=config.boolean("norm_topk_prob", False),
        expert_width=config.integer("moe_intermediate_size", maximum=MAX_WIDTH),
        dense_width=config.integer("intermediate_size", maximum=MAX_WIDTH) if dense_layers else 0,
        dense_layers=dense_layers,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6, below=1.0),
        tied_embeddings=config.boolean("tie_word_embeddings", False),
        rope=read_rope(config),
        max_context=config.integer("max_position_embeddings", 32768, maximum=MAX_POSITIONS),
        eos_ids=eos_ids,
    )


def _refuse_options(config: JsonFields) -> None:
    if config.text("hidden_act", "silu") != "silu":
        raise config.unsupported("hidden_act", "silu")
    if config.boolean("use_sliding_window", False):
        raise config.unsupported("use_sliding_window", "false")
    if config.has("quantization_config"):
        raise config.unsupported("quantization_config", "none (weights in float32, bfloat16 or float16)")


def _num_experts(config: JsonFields) -> int:
    """Published as num_experts, written by transformers 5 as num_local_experts."""
    names = [name for name in ("num_experts", "num_local_experts") if config.has(name)]
    counts = {config.integer(name, maximum=MAX_EXPERTS) for name in names or ["num_experts"]}
    if len(counts) > 1:
        raise config.wrong("num_local_experts", f"num_experts = {config.values['num_experts']}")
    return counts.pop()


def _head_dim(config: JsonFields, hidden_size: int, num_heads: int) -> int:
    head_dim = config.integer("head_dim", hidden_size // num_heads, maximum=MAX_HEAD_DIM)
    if head_dim % 2 or head_dim < 2:
        raise config.wrong("head_dim", "an even number (rotary pairs), given or as hidden_size / num_attention_heads")
    return head_dim


def _dense_layers(config: JsonFields, num_layers: int) -> tuple[int, ...]:
    """Layers in mlp_only_layers, and those that decoder_sparse_step skips."""
    listed = set(config.integers("mlp_only_layers"))
    step = config.integer("decoder_sparse_step", 1, maximum=MAX_LAYERS)
    return tuple(layer for layer in range(num_layers) if layer in listed or (layer + 1) % step)


FAMILIES: dict[str, Callable[[JsonFields, tuple[int, ...]], ModelSpec]] = {"qwen3_moe": _read_qwen3_moe}
