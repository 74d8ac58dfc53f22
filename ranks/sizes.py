"""The tensors a family's checkpoint must hold, and what they come to: parameters by part, bytes by rank.

Imports no torch: `Checkpoint.check` and `leafsum inspect` use it in processes that compute nothing.
"""

from __future__ import annotations

from collections.abc import Collection

from .spec import ModelSpec

Shape = tuple[int, ...]

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
REPLICATED_PARTS = ("embedding", "router", "dense", "norms")
"""Parts that every rank holds whole. Heads and vocabulary rows are split, experts are placed."""

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def layer_name(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{name}"


def fused_experts(layer: int) -> tuple[str, str]:
    """gate_up_proj [E, 2 * width, hidden] (gate rows first) and down_proj [E, hidden, width]."""
    return layer_name(layer, "mlp.experts.gate_up_proj"), layer_name(layer, "mlp.experts.down_proj")


def expected_tensors(spec: ModelSpec, present: Collection[str]) -> dict[str, Shape]:
    """Shape by name.

    `present` (the checkpoint's names) decides only between the two published layouts of a layer's experts, and whether
    a tied model carries its head as well.
    """
    shapes: dict[str, Shape] = {EMBEDDING: (spec.vocab_size, spec.hidden_size), FINAL_NORM: (spec.hidden_size,)}
    if not spec.tied_embeddings or HEAD in present:
        shapes[HEAD] = (spec.vocab_size, spec.hidden_size)
    dense_layers = frozenset(spec.dense_layers)
    for layer in range(spec.num_layers):
        if layer in dense_layers:
            parts = _gated_shapes("mlp.", spec.dense_width, spec.hidden_size)
        else:
            parts = _expert_shapes(spec, layer, present)
        parts |= _attention_shapes(spec)
        parts["input_layernorm.weight"] = parts["post_attention_layernorm.weight"] = (spec.hidden_size,)
        shapes |= {layer_name(layer, name): shape for name, shape in parts.items()}
    return shapes


def _attention_shapes(spec: ModelSpec) -> dict[str, Shape]:
    query_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    linears = {
        "q_proj": (query_width, spec.hidden_size),
        "k_proj": (kv_width, spec.hidden_size),
        "v_proj": (kv_width, spec.hidden_size),
        "o_proj": (spec.hidden_size, query_width),
    }
    shapes: dict[str, Shape] = {f"self_attn.{name}.weight": shape for name, shape in linears.items()}
    shapes |= {f"self_attn.{name}.weight": (spec.head_dim,) for name in ("q_norm", "k_norm")}
    if spec.attention_bias:
        shapes |= {f"self_attn.{name}.bias": shape[:1] for name, shape in linears.items()}
    return shapes


def _expert_shapes(spec: ModelSpec, layer: int, present: Collection[str]) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {"mlp.gate.weight": (spec.num_experts, spec.hidden_size)}
    if fused_experts(layer)[0] in present:
        shapes["mlp.experts.gate_up_proj"] = (spec.num_experts, 2 * spec.expert_width, spec.hidden_size)
        shapes["mlp.experts.down_proj"] = (spec.num_experts, spec.hidden_size, spec.expert_width)
        return shapes
    for expert in range(spec.num_experts):
        shapes |= _gated_shapes(f"mlp.experts.{expert}.", spec.expert_width, spec.hidden_size)
    return shapes


def _gated_shapes(prefix: str, width: int, hidden_size: int) -> dict[str, Shape]:
    return {
        f"{prefix}gate_proj.weight": (width, hidden_size),
        f"{prefix}up_proj.weight": (width, hidden_size),
        f"{prefix}down_proj.weight": (hidden_size, width),
    }


def parameter_counts(spec: ModelSpec) -> dict[str, int]:
    """Parameters of the whole model by part; a tied head counts none."""
    counts = _rank_counts(spec, spec.num_heads, spec.num_kv_heads, spec.num_experts, spec.vocab_size)
    return counts | {"head": 0 if spec.tied_embeddings else counts["head"]}


def rank_bytes(
    spec: ModelSpec, rank: int, num_ranks: int, dtype: str, num_owned_experts: int, embedding_bytes_per_value: int
) -> dict[str, int]:
    """Bytes of weights that one rank keeps, by part, without padding.

    Linears are in the compute dtype, the embedding as stored, norms in FP32. A tied head is kept a second time, as a
    linear. Biases are counted as the rest of their linear.
    `num_owned_experts`: len(placement.ids_of(rank)).
    """
    first, stop = spec.vocab_range(rank, num_ranks)
    num_heads, num_kv_heads = len(spec.heads(rank, num_ranks)), len(spec.kv_heads(rank, num_ranks))
    counts = _rank_counts(spec, num_heads, num_kv_heads, num_owned_experts, stop - first)
    bytes_per_value = {"embedding": embedding_bytes_per_value, "norms": BYTES["float32"]}
    return {part: count * bytes_per_value.get(part, BYTES[dtype]) for part, count in counts.items()}


def kv_bytes_per_token(spec: ModelSpec, rank: int, num_ranks: int, dtype: str) -> int:
    """Bytes of keys and values that one position takes on one rank, all layers together."""
    return 2 * spec.num_layers * len(spec.kv_heads(rank, num_ranks)) * spec.head_dim * BYTES[dtype]


def _rank_counts(
    spec: ModelSpec, num_heads: int, num_kv_heads: int, num_experts: int, vocab_rows: int
) -> dict[str, int]:
    hidden, num_expert_layers = spec.hidden_size, len(spec.expert_layers)
    query_width, kv_width = num_heads * spec.head_dim, num_kv_heads * spec.head_dim
    biases = query_width + 2 * kv_width + hidden if spec.attention_bias else 0
    return {
        "embedding": spec.vocab_size * hidden,
        "attention": spec.num_layers * (2 * hidden * (query_width + kv_width) + biases),
        "router": num_expert_layers * spec.num_experts * hidden,
        "experts": num_expert_layers * num_experts * 3 * spec.expert_width * hidden,
        "dense": len(spec.dense_layers) * 3 * spec.dense_width * hidden,
        "norms": spec.num_layers * 2 * (hidden + spec.head_dim) + hidden,
        "head": vocab_rows * hidden,
    }
