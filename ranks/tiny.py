"""The demonstration model `tiny`: small random weights of the family qwen3_moe, the same bits on every machine.

Weights are exact functions of a seed: raw Philox words, integer sums, a few IEEE float64 operations, one rounding.
No library function that may round differently elsewhere takes part. They are random but for two things. The head's
rows follow which letter comes after which in TEXT, so that what the model writes can be read aloud, though it means
nothing. And `_plant_hazards` makes what a careless sum gets wrong happen in every prompt: ties, subnormals, -0.0.
"""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .user_cache import made_once

VERSION = 2
"""Of the content: the folder's name. A change of any byte below is a new version."""

SEED = 7
NUM_BYTES = 256
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = NUM_BYTES + len(SPECIAL_TOKENS)
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 128, 8, 2, 32, 4
EXPERTS, EXPERT_WIDTH = 64, 16
SUBNORMAL_ELEMENT, ZERO_ELEMENT = 40, 90

TEXT = """
a tree holds many leaves and no two winds move them in the same order. the roots do not ask which branch came first;
they take the water up and give it out again, drop after drop, and every spring the sum is the same green.
some evenings a child sits under it and counts: one for the leaf that fell, one for the bird that stayed, one for the
stone by the river. whoever counts from left to right, and then from right to left, should find the same number.
"""

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": 4 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_experts": EXPERTS,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": EXPERT_WIDTH,
    "norm_topk_prob": True,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "use_sliding_window": False,
    "bos_token_id": 256,
    "eos_token_id": 258,
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
    """Write the whole model folder, 4 MB."""
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


def _tensors() -> dict[str, U16]:
    noise = _Noise(SEED)
    codes = noise.integers(VOCAB_SIZE, HIDDEN)
    codes[:, [SUBNORMAL_ELEMENT, ZERO_ELEMENT]] = 0
    tensors = {
        "model.embed_tokens.weight": codes / 37837.0,
        "lm_head.weight": _head(codes, noise),
        "model.norm.weight": np.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        tensors |= {f"model.layers.{layer}.{name}": value for name, value in _layer(noise).items()}
    return {name: _bf16_bits(value) for name, value in tensors.items()}


def _layer(noise: _Noise) -> dict[str, F64]:
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = {
        "input_layernorm.weight": np.ones(HIDDEN),
        "post_attention_layernorm.weight": np.ones(HIDDEN),
        "self_attn.q_norm.weight": np.full(HEAD_DIM, 1.5),
        "self_attn.k_norm.weight": np.full(HEAD_DIM, 1.5),
        "self_attn.q_proj.weight": noise.values(HIDDEN**-0.5, queries, HIDDEN),
        "self_attn.k_proj.weight": noise.values(HIDDEN**-0.5, keys, HIDDEN),
        "self_attn.v_proj.weight": noise.values(HIDDEN**-0.5, keys, HIDDEN),
        "self_attn.o_proj.weight": noise.values(queries**-0.5, HIDDEN, queries),
        "mlp.gate.weight": noise.values(1.5 * HIDDEN**-0.5, EXPERTS, HIDDEN),
    }
    for expert in range(EXPERTS):
        layer[f"mlp.experts.{expert}.gate_proj.weight"] = noise.values(HIDDEN**-0.5, EXPERT_WIDTH, HIDDEN)
        layer[f"mlp.experts.{expert}.up_proj.weight"] = noise.values(HIDDEN**-0.5, EXPERT_WIDTH, HIDDEN)
        layer[f"mlp.experts.{expert}.down_proj.weight"] = noise.values(3 * EXPERT_WIDTH**-0.5, HIDDEN, EXPERT_WIDTH)
    _plant_hazards(layer)
    return layer


def _plant_hazards(layer: dict[str, F64]) -> None:
    """What a sum over ranks can get wrong, where nothing else hides it.

    The router cannot tell the last expert of a leaf from the first of the next one. Nothing but experts writes to two
    elements of the residual: to one of them values of about 2^-128, below FP32's smallest normal number; to the other
    products of an inner value of about 2^-17 with the smallest bfloat16 numbers, most of which round to a zero of
    their sign.
    """
    router = layer["mlp.gate.weight"]
    router[8::8] = router[7:-1:8]
    layer["self_attn.o_proj.weight"][[SUBNORMAL_ELEMENT, ZERO_ELEMENT]] = 0
    for expert in range(EXPERTS):
        layer[f"mlp.experts.{expert}.up_proj.weight"][0] *= 2.0**-16
        down = layer[f"mlp.experts.{expert}.down_proj.weight"]
        down[SUBNORMAL_ELEMENT] *= 2.0**-127
        down[ZERO_ELEMENT, 0] *= 2.0**-132
        down[ZERO_ELEMENT, 1:] = 0


def _head(codes: NDArray[np.int64], noise: _Noise) -> F64:
    """Row c: the codes of the bytes that c follows in TEXT, and noise; nearly nothing for bytes that TEXT lacks.

    The weights below were tried out: without the division, the most frequent letters drown the others in greedy text.
    """
    text = TEXT.encode()
    follows = np.zeros((VOCAB_SIZE, VOCAB_SIZE), dtype=np.int64)
    for before, after in itertools.pairwise(text):
        follows[after, before] += 1
    # Integer products: a float matmul would add in an order of the library's own.
    scores = (np.minimum(follows, 3) + 7 * (follows > 0)) @ codes
    lengths = np.sqrt(np.maximum((scores * scores).sum(axis=1), 1).astype(np.float64))
    rows: F64 = scores / np.sqrt(lengths)[:, None] * 3.1e-4 + noise.values(0.6 * HIDDEN**-0.5, VOCAB_SIZE, HIDDEN)
    loudness: F64 = np.full(VOCAB_SIZE, 0.01)
    loudness[list(text)] = [1.0 if chr(byte).isalpha() or byte == ord(" ") else 0.8 for byte in text]
    return rows * loudness[:, None]


def _bf16_bits(values: F64) -> U16:
    """float64 -> FP32 -> bfloat16, both to nearest even; defined bit for bit, which is all that matters here."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
