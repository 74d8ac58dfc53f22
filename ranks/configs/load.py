"""From a model folder to its ModelSpec: the family that config.json names, and the ids that end a text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...errors import ModelError
from ..json_fields import JsonFields
from ..spec import ModelSpec
from .published import PublishedConfig, plain, wrapped
from .qwen3_5_moe import read_qwen3_5_moe
from .qwen3_moe import read_qwen3_moe
from .qwen3_next import read_qwen3_next
from .qwen4_exp import read_qwen4_exp

FAMILIES: dict[str, Callable[[PublishedConfig], ModelSpec]] = {
    "qwen3_moe": read_qwen3_moe,
    "qwen3_next": read_qwen3_next,
    "qwen3_5_moe": read_qwen3_5_moe,
    "qwen4_exp": read_qwen4_exp,
}

MODEL_TYPES: dict[str, Callable[[JsonFields], PublishedConfig]] = {
    "qwen3_moe": lambda fields: plain("qwen3_moe", fields),
    "qwen3_next": lambda fields: plain("qwen3_next", fields),
    "qwen3_5_moe": lambda fields: wrapped("qwen3_5_moe", fields),
    "qwen3_5_moe_text": lambda fields: plain("qwen3_5_moe", fields),
    "qwen4_exp": lambda fields: wrapped("qwen4_exp", fields),
    "qwen4_exp_text": lambda fields: plain("qwen4_exp", fields),
}


def load_spec(model_dir: Path) -> ModelSpec:
    """Read config.json and generation_config.json. Raises ModelError that names the folder, field or family."""
    if not model_dir.is_dir():
        raise ModelError(
            f"expected a model folder, found {_what_is(model_dir)} at {model_dir}. Give the folder with config.json"
        )
    if not (model_dir / "config.json").is_file():
        raise ModelError(f"expected config.json in {model_dir}, it is not there. Give the folder of a whole model")
    fields = JsonFields.read(model_dir / "config.json")
    model_type = fields.text("model_type")
    if model_type not in MODEL_TYPES:
        raise ModelError(
            f"{fields.path}: model_type {model_type[:80]!r} is not a known family; known: "
            f"{', '.join(sorted(MODEL_TYPES))}"
        )
    config = MODEL_TYPES[model_type](fields)
    spec = FAMILIES[config.family](config)
    if any(eos_id >= spec.vocab_size for eos_id in spec.eos_ids):
        raise config.eos_fields().wrong("eos_token_id", f"ids below vocab_size = {spec.vocab_size}")
    return spec


def _what_is(path: Path) -> str:
    return "a file" if path.exists() else "nothing"
