"""The family qwen4_exp, text: DeltaNet and sparse attention between hyper-connections, and n-gram embeddings."""

from __future__ import annotations

from dataclasses import replace

from ..json_fields import JsonFields
from ..rope import MAX_POSITIONS
from ..spec import (
    ATTENTION,
    DELTANET,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_NGRAM_BASE,
    MAX_NGRAM_TABLES,
    MAX_REACH,
    MAX_STREAMS,
    MAX_WIDTH,
    HyperSpec,
    IndexerSpec,
    ModelSpec,
    NgramSpec,
)
from .hybrid import MROPE_KEYS, read_hybrid
from .published import PublishedConfig

MAX_SEED = 2**63 - 1


def read_qwen4_exp(config: PublishedConfig) -> ModelSpec:
    fields = config.text
    spec = read_hybrid(
        config,
        # published as full_attention, written by transformers as indexed_attention: sparse attention either way
        kind_names={"linear_attention": DELTANET, "full_attention": ATTENTION, "indexed_attention": ATTENTION},
        output_gates=("silu", "sigmoid"),
        rotary_factor=1.0,
        rope_keys_without_effect=MROPE_KEYS,
        fused_projections=False,
        dense_layers=(),
        renormalise=fields.boolean("norm_topk_prob", True),
    )
    return replace(
        spec,
        indexer=read_indexer(fields, spec.rotary_dim) if ATTENTION in spec.layer_kinds else None,
        hyper=HyperSpec(
            num_streams=fields.integer("hc_count", 4, minimum=2, maximum=MAX_STREAMS),
            low_rank=fields.integer("hc_lowrank", 320, maximum=MAX_WIDTH),
        ),
        ngram=read_ngram(fields, spec),
    )


def read_indexer(fields: JsonFields, rotary_dim: int) -> IndexerSpec:
    if fields.integer("indexer_kv_heads", maximum=MAX_HEADS) != 1:
        raise fields.unsupported("indexer_kv_heads", "1")
    budget = fields.integer("indexer_budget", maximum=MAX_POSITIONS)
    block_size = fields.integer("indexer_compress_ratio", maximum=MAX_REACH)
    if budget % block_size:
        raise fields.wrong("indexer_budget", f"a multiple of indexer_compress_ratio = {block_size}")
    head_dim = fields.integer("indexer_head_dim", maximum=MAX_HEAD_DIM)
    if head_dim < rotary_dim:
        raise fields.wrong("indexer_head_dim", f"at least the {rotary_dim} elements of a head that are rotated")
    return IndexerSpec(
        num_heads=fields.integer("indexer_n_heads", maximum=MAX_HEADS),
        head_dim=head_dim,
        budget=budget,
        block_size=block_size,
    )


def read_ngram(fields: JsonFields, spec: ModelSpec) -> NgramSpec | None:
    """None where no layer has an n-gram embedding."""
    layers = _ngram_layers(fields, spec)
    if not layers:
        return None
    ngram_size = fields.integer("ngram_size", 3, minimum=2, maximum=MAX_REACH + 1)
    heads_per_ngram = fields.integer("heads_per_ngram", 8, maximum=MAX_NGRAM_TABLES)
    num_heads = (ngram_size - 1) * heads_per_ngram
    if num_heads * len(layers) > MAX_NGRAM_TABLES:
        raise fields.wrong(
            "heads_per_ngram",
            f"at most {MAX_NGRAM_TABLES} tables in all, one for each of {len(layers)} layers, {ngram_size - 1} n-grams "
            "and their heads",
        )
    embed_dim = fields.integer("ple_embed_dim", spec.hidden_size, maximum=MAX_WIDTH)
    if embed_dim % num_heads:
        raise fields.wrong("ple_embed_dim", f"a multiple of the {num_heads} n-gram heads, given or as hidden_size")
    conv_taps = fields.integer("ple_conv_kernel_size", 4, maximum=MAX_REACH + 1)
    if (conv_taps - 1) * ngram_size > MAX_REACH:
        raise fields.wrong("ple_conv_kernel_size", f"(taps - 1) * ngram_size of at most {MAX_REACH} positions")
    return NgramSpec(
        layers=layers,
        embed_dim=embed_dim,
        conv_taps=conv_taps,
        ngram_size=ngram_size,
        heads_per_ngram=heads_per_ngram,
        vocab_base=fields.integer("ngram_vocab_size_base", 20_000_000, maximum=MAX_NGRAM_BASE),
        divisor=fields.integer("make_ngram_vocab_size_divisible_by", 128, maximum=MAX_NGRAM_BASE),
        seed=fields.integer("seed", 1234, minimum=0, maximum=MAX_SEED),
        end_id=_end_id(fields, spec.vocab_size),
    )


def _ngram_layers(fields: JsonFields, spec: ModelSpec) -> tuple[int, ...]:
    """Zero-based and ascending; config.json counts from one."""
    ids = sorted(set(fields.integers("ple_layer_ids")))
    if ids and not 1 <= ids[0] <= ids[-1] <= spec.num_layers:
        raise fields.wrong("ple_layer_ids", f"layers counted from 1 to num_hidden_layers = {spec.num_layers}")
    if any(spec.layer_kinds[layer_id - 1] != DELTANET for layer_id in ids):
        raise fields.unsupported("ple_layer_ids", "layers of linear_attention alone, counted from one")
    return tuple(layer_id - 1 for layer_id in ids)


def _end_id(fields: JsonFields, vocab_size: int) -> int:
    """The token behind which n-grams start anew: the text model's own eos_token_id, the first of several."""
    ids = fields.integers("eos_token_id")
    if not ids or ids[0] >= vocab_size:
        raise fields.wrong("eos_token_id", f"an id below vocab_size = {vocab_size}, behind which n-grams start anew")
    return ids[0]
