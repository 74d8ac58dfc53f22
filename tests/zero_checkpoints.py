"""Model folders of any size whose weights are all zero: files with holes, written in a moment, that take no disk."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from family_checkpoints import config_fields
from leafsum.ranks.configs.load import load_spec
from leafsum.ranks.sizes import expected_tensors, fused_experts

INDEX = "model.safetensors.index.json"


def write_zeros(folder: Path, family: str, **changes: Any) -> Path:
    """bfloat16, a layer's experts fused, n-gram tables whole and in a file of their own ("table.safetensors")."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_fields(family, False, changes)))
    spec = load_spec(folder)
    fused = {name: None for layer in range(spec.num_layers) for name in fused_experts(spec, layer)}
    shapes = expected_tensors(spec, fused)
    files: dict[str, dict[str, tuple[int, ...]]] = {"weights.safetensors": {}, "table.safetensors": {}}
    for name, shape in shapes.items():
        files["table.safetensors" if "ngram_embedding" in name else "weights.safetensors"][name] = shape
    for file_name, of_file in files.items():
        write_file(folder / file_name, of_file)
    weight_map = {name: file_name for file_name, of_file in files.items() for name in of_file}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_file(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + end)
