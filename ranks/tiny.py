"""The demonstration model `tiny`: a small Flash Next (family qwen4_exp), the same bits on every machine.

Weights are exact functions of a seed: raw Philox words, integer sums, a few IEEE float64 operations, one rounding.
No library function that may round differently elsewhere takes part. They are random but for two things. The head's
rows follow which letter comes after which in TEXT, so that what the model writes can be read aloud, though it means
nothing. And `_plant_hazards` makes what a careless sum gets wrong happen in every prompt: ties, subnormals, -0.0.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .user_cache import made_once

VERSION = 3
"""Of the content: the folder's name. A change of any byte below is a new version."""

SEED = 6
NUM_BYTES = 256
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = NUM_BYTES + len(SPECIAL_TOKENS)
HIDDEN, STREAMS, LOW_RANK = 128, 4, 16
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 32
INDEX_HEADS, INDEX_DIM = 2, 16
KEY_HEADS, VALUE_HEADS, LINEAR_DIM, CONV_TAPS = 4, 8, 16, 4
EXPERTS, EXPERT_WIDTH = 64, 16
LAYER_KINDS = ("linear_attention", "linear_attention", "linear_attention", "full_attention")
NGRAM_LAYER, NGRAM_HEADS, NGRAM_ROWS, NGRAM_SHARDS = 1, 8, 2688, 2
"""Rows: the first eight primes from 300 on make 2612, which are padded to a multiple of 128."""
SUBNORMAL_ELEMENT, ZERO_ELEMENT = 40, 90
EXPERT_PREFIXES = ("shared_expert.", *(f"experts.{expert}." for expert in range(EXPERTS)))

TEXT = """
a tree holds many leaves and no two winds move them in the same order. the roots do not ask which branch came first;
they take the water up and give it out again, drop after drop, and every spring the sum is the same green.
some evenings a child sits under it and counts: one for the leaf that fell, one for the bird that stayed, one for the
stone by the river. whoever counts from left to right, and then from right to left, should find the same number.
"""

# Wrapped, as Flash Next is published: whoever reads this model reads a text model inside another. It has no vision.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen4ExpForConditionalGeneration"],
    "model_type": "qwen4_exp",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen4_exp_text",
        "dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "num_hidden_layers": len(LAYER_KINDS),
        "layer_types": list(LAYER_KINDS),
        "hc_count": STREAMS,
        "hc_lowrank": LOW_RANK,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "attention_bias": False,
        "attn_output_gate": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
        "max_position_embeddings": 32768,
        "indexer_n_heads": INDEX_HEADS,
        "indexer_kv_heads": 1,
        "indexer_head_dim": INDEX_DIM,
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "linear_key_head_dim": LINEAR_DIM,
        "linear_value_head_dim": LINEAR_DIM,
        "linear_conv_kernel_dim": CONV_TAPS,
        "output_gate_type": "sigmoid",
        "ple_layer_ids": [NGRAM_LAYER + 1],
        "ple_embed_dim": HIDDEN,
        "ple_conv_kernel_size": CONV_TAPS,
        "ngram_size": 3,
        "heads_per_ngram": NGRAM_HEADS // 2,
        "ngram_vocab_size_base": 300,
        "make_ngram_vocab_size_divisible_by": 128,
        "split_ngram_parts": NGRAM_SHARDS,
        "seed": 1234,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": EXPERT_WIDTH,
        "shared_expert_intermediate_size": EXPERT_WIDTH,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 256,
    },
}
GENERATION_CONFIG = {"bos_token_id": 256, "eos_token_id": [256, 258]}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

F64 = NDArray[np.float64]
U16 = NDArray[np.uint16]


def ensure_tiny() -> Path:
    """The model's folder in the user's cache; made on first use. ConfigError where the cache cannot be written."""
    return made_once("the demonstration model", f"tiny-{VERSION}", write_tiny)


def write_tiny(folder: Path) -> None:
    """Write the whole model folder, 5 MB."""
    _write_json(folder / "config.json", CONFIG)
    _write_json(folder / "generation_config.json", GENERATION_CONFIG)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "tokenizer.json").write_text(_tokenizer().to_str(pretty=True), encoding="utf-8")
    write_safetensors(folder / "model.safetensors", _tensors())


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def write_safetensors(path: Path, tensors: dict[str, U16]) -> None:
    """bfloat16 bits by name. Not by the library: the file's bytes, alignment and order included, never change so."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in sorted(tensors):
        end = offset + tensors[name].nbytes
        header[name] = {"dtype": "BF16", "shape": list(tensors[name].shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name in sorted(tensors):
            stream.write(tensors[name].astype("<u2").tobytes())


def _tokenizer() -> Tokenizer:
    """One token a byte: id = byte value, written as the character that byte-level tokenizers use for it."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(NUM_BYTES) if byte not in visible]
    characters = {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    vocab = {characters[byte]: byte for byte in range(NUM_BYTES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    return tokenizer


class _Noise:
    """Values near a normal distribution: sums of four 16-bit integers, exact until the one product with the scale."""

    def __init__(self, seed: int) -> None:
        self.words = np.random.Philox(key=seed)

    def integers(self, *shape: int) -> NDArray[np.int64]:
        """Mean 0, standard deviation about 37837 (two uniform 16-bit ones make 26755)."""
        raw = self.words.random_raw(int(np.prod(shape))).reshape(shape)
        quarters = [((raw >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64) for shift in (0, 16, 32, 48)]
        return sum(quarters, start=np.zeros(shape, np.int64)) - 2 * 0xFFFF

    def values(self, scale: float, *shape: int) -> F64:
        return self.integers(*shape).astype(np.float64) * (scale / 37837.0)

    def linear(self, gain: float, num_rows: int, width: int) -> F64:
        """An input of variance 1 comes out with a deviation of `gain`."""
        return self.values(gain / math.sqrt(width), num_rows, width)


def _tensors() -> dict[str, U16]:
    noise = _Noise(SEED)
    codes = noise.integers(VOCAB_SIZE, HIDDEN)
    codes[:, [SUBNORMAL_ELEMENT, ZERO_ELEMENT]] = 0
    text = {"embed_tokens.weight": codes / 37837.0}
    for layer in range(len(LAYER_KINDS)):
        text |= {f"layers.{layer}.{name}": value for name, value in _layer(noise, layer).items()}
    text |= _mixer(noise, "hyper_connection_mixer.")
    tensors = {f"model.language_model.{name}": value for name, value in text.items()}
    tensors["lm_head.weight"] = _head(codes, noise)
    return {name: _bf16_bits(value) for name, value in tensors.items()}


def _layer(noise: _Noise, layer: int) -> dict[str, F64]:
    """Gains were tried out. A block's input is about half as large as a norm's output: a mean of gated streams."""
    weights = _mixer(noise, "attn_hyper_connection.") | _mixer(noise, "mlp_hyper_connection.")
    for name in ("attn", "mlp"):
        weights[f"{name}_hyper_connection.block_inject_weight.weight"] = noise.linear(4, STREAMS, STREAMS * HIDDEN)
    weights |= _attention(noise) if LAYER_KINDS[layer] == "full_attention" else _deltanet(noise)
    weights |= _experts(noise)
    if layer == NGRAM_LAYER:
        weights |= _ngrams(noise)
    _plant_hazards(weights)
    return weights


def _mixer(noise: _Noise, prefix: str) -> dict[str, F64]:
    return {
        f"{prefix}hc_norm.weight": noise.values(0.1, STREAMS * HIDDEN),
        f"{prefix}input_mix_weight_down.weight": noise.linear(4, LOW_RANK, STREAMS * HIDDEN),
        f"{prefix}input_mix_weight_up.weight": noise.linear(2, STREAMS * HIDDEN, LOW_RANK),
    }


def _deltanet(noise: _Noise) -> dict[str, F64]:
    """Heads forget at different speeds: A_log and dt_bias let a state decay, a token, by a thousandth to a half."""
    keys, values = KEY_HEADS * LINEAR_DIM, VALUE_HEADS * LINEAR_DIM
    slow_to_fast = np.arange(VALUE_HEADS, dtype=np.float64)
    weights = {
        "in_proj_qkv": noise.linear(2, 2 * keys + values, HIDDEN),
        "in_proj_z": noise.linear(2, values, HIDDEN),
        "in_proj_b": noise.linear(2, VALUE_HEADS, HIDDEN),
        "in_proj_a": noise.linear(1, VALUE_HEADS, HIDDEN),
        "conv1d": noise.values(0.5, 2 * keys + values, 1, CONV_TAPS),
        "norm": 1 + noise.values(0.1, LINEAR_DIM),
        "out_proj": noise.linear(0.8, HIDDEN, values),
    }
    return {f"linear_attn.{name}.weight": value for name, value in weights.items()} | {
        "linear_attn.A_log": slow_to_fast / 2 - 2 + noise.values(0.1, VALUE_HEADS),
        "linear_attn.dt_bias": slow_to_fast / 2 - 4 + noise.values(0.1, VALUE_HEADS),
    }


def _attention(noise: _Noise) -> dict[str, F64]:
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    weights = {
        "q_proj": noise.linear(2, 2 * queries, HIDDEN),
        "k_proj": noise.linear(2, keys, HIDDEN),
        "v_proj": noise.linear(2, keys, HIDDEN),
        "o_proj": noise.linear(3, HIDDEN, queries),
        "q_norm": 0.5 + noise.values(0.1, HEAD_DIM),
        "k_norm": 0.5 + noise.values(0.1, HEAD_DIM),
        "indexer.index_qk_proj": noise.linear(2, (INDEX_HEADS + 1) * INDEX_DIM, HIDDEN),
        "indexer.q_layernorm": noise.values(0.1, INDEX_DIM),
        "indexer.k_layernorm": noise.values(0.1, INDEX_DIM),
    }
    return {f"self_attn.{name}.weight": value for name, value in weights.items()}


def _experts(noise: _Noise) -> dict[str, F64]:
    weights = {
        "gate": noise.linear(3, EXPERTS, HIDDEN),
        "shared_expert_gate": noise.linear(2, 1, HIDDEN),
    }
    for prefix in EXPERT_PREFIXES:
        weights[f"{prefix}gate_proj"] = noise.linear(2, EXPERT_WIDTH, HIDDEN)
        weights[f"{prefix}up_proj"] = noise.linear(2, EXPERT_WIDTH, HIDDEN)
        weights[f"{prefix}down_proj"] = noise.linear(2.5, HIDDEN, EXPERT_WIDTH)
    return {f"mlp.{name}.weight": value for name, value in weights.items()}


def _ngrams(noise: _Noise) -> dict[str, F64]:
    width = STREAMS * HIDDEN
    weights = {
        "key_proj": noise.linear(1, width, HIDDEN),
        "value_proj": noise.linear(0.8, HIDDEN, HIDDEN),
        "conv1d": noise.values(0.3, width, 1, CONV_TAPS),
        "norm_key": noise.values(0.1, width),
        "norm_query": noise.values(0.1, width),
        "norm_conv": noise.values(0.1, width),
    }
    table = noise.values(1.0, NGRAM_ROWS, HIDDEN // NGRAM_HEADS)
    for shard, rows in enumerate(np.split(table, NGRAM_SHARDS)):
        weights[f"ple_embedding.ngram_embedding.shard_{shard}"] = rows
    return {f"ple.{name}.weight": value for name, value in weights.items()}


def _plant_hazards(layer: dict[str, F64]) -> None:
    """What a sum over ranks can get wrong, where nothing else hides it.

    The router cannot tell the last expert of a leaf from the first of the next one, nor most experts of the first half
    from a twin in the second: nearly every third choice ends between two of equal weight, mostly on different ranks.
    Nothing but experts writes to two elements of every stream: to one of them values of about 2^-128, below FP32's
    smallest normal number; to the other products of an inner value of about 2^-17 with the smallest bfloat16 numbers,
    most of which round to a zero of their sign.
    """
    leaves = layer["mlp.gate.weight"].reshape(-1, 8, HIDDEN)
    leaves[1:, 0] = leaves[:-1, 7]
    leaves[4:, 2:7] = leaves[:4, 1:6]
    for name in ("self_attn.o_proj.weight", "linear_attn.out_proj.weight", "ple.value_proj.weight"):
        if name in layer:
            layer[name][[SUBNORMAL_ELEMENT, ZERO_ELEMENT]] = 0
    for prefix in EXPERT_PREFIXES:
        layer[f"mlp.{prefix}up_proj.weight"][0] *= 2.0**-16
        down = layer[f"mlp.{prefix}down_proj.weight"]
        down[SUBNORMAL_ELEMENT] *= 2.0**-127
        down[ZERO_ELEMENT, 0] *= 2.0**-132
        down[ZERO_ELEMENT, 1:] = 0


def _head(codes: NDArray[np.int64], noise: _Noise) -> F64:
    """Row c: the codes of the bytes that c follows in TEXT, and noise; nearly nothing for bytes that TEXT lacks.

    What reaches the head is the last mixer's mean of gated, normed streams, of which the last byte's embedding is a
    good part: nearly nine in ten pairs of letters of greedy text are pairs of TEXT too. Which of the letters that may
    follow is next, the blocks say, and so all the text before. The weights below were tried out: without the division,
    the most frequent letters drown the others; with a space as loud as a letter, words are twice as long.
    """
    text = TEXT.encode()
    follows = np.zeros((VOCAB_SIZE, VOCAB_SIZE), dtype=np.int64)
    for before, after in itertools.pairwise(text):
        follows[after, before] += 1
    # Integer products: a float matmul would add in an order of the library's own.
    scores = (np.minimum(follows, 3) + 7 * (follows > 0)) @ codes
    lengths = np.sqrt(np.maximum((scores * scores).sum(axis=1), 1).astype(np.float64))
    rows: F64 = scores / np.sqrt(lengths)[:, None] * 3.1e-4 + noise.linear(0.6, VOCAB_SIZE, HIDDEN)
    loudness: F64 = np.full(VOCAB_SIZE, 0.01)
    loudness[list(text)] = [1.0 if chr(byte).isalpha() else 0.8 for byte in text]
    loudness[ord(" ")] = 1.2
    return rows * loudness[:, None]


def _bf16_bits(values: F64) -> U16:
    """float64 -> FP32 -> bfloat16, both to nearest even; defined bit for bit, which is all that matters here."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
