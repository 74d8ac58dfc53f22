"""A model folder's safetensors files: names, types and shapes from the headers alone, and the model digest.

Imports no torch and reads no weights; `weights` does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from ..errors import ModelError
from .json_fields import JsonFields, is_regular_file

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
BUFFER_NAMES = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
"""Of the n-gram embedding, in I64: what follows from config.json and some files hold all the same."""
HARMLESS_SUFFIXES = ("rotary_emb.inv_freq",)
"""Buffers that older exports carry and every reader computes for itself."""

MOST_NAMES_SHOWN = 4
MAX_FILE_NAME_BYTES = 255


class TensorEntry(NamedTuple):
    """One stored tensor: `dtype` as safetensors names it ("BF16"), and where in which file its bytes lie.

    A tuple, since the largest folders hold 75,000 and more: a frozen dataclass takes six times as long to make.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Ignored:
    """Tensors that nobody reads, together."""

    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a folder. `digest`: SHA-256 over config.json, the safetensors headers, file names and sizes."""

    model_dir: Path
    files: tuple[Path, ...]
    entries: Mapping[str, TensorEntry]
    digest: str

    @classmethod
    def open(cls, model_dir: Path) -> Checkpoint:
        """Raises ModelError for a missing, damaged or truncated file, and for a folder without safetensors."""
        index = _read_index(model_dir)
        files = _shard_files(model_dir, index) if index is not None else (_single_file(model_dir),)
        entries: dict[str, TensorEntry] = {}
        names_in: dict[str, Collection[str]] = {}
        for file in files:
            found = _read_header(file)
            for name in entries.keys() & found.keys():
                raise ModelError(f"tensor {name} lies in both {entries[name].file} and {file}. Keep one of them")
            entries |= found
            names_in[file.name] = found.keys()
        for name, shard in (index or {}).items():
            if name not in names_in[shard]:
                raise ModelError(
                    f"{model_dir / INDEX_FILE} places tensor {name} in {shard}, which lacks it. Fetch both again"
                )
        return cls(model_dir, files, entries, _digest(model_dir, files))

    def stamp(self) -> str:
        """SHA-256 over which files these are on this machine, and when they were last written: device, inode, size,
        mtime. Two looks at a folder whose files nobody has replaced or written in between come to the same.
        """
        found = hashlib.sha256()
        for file in (self.model_dir / "config.json", *self.files):
            try:
                facts = file.stat()
            except OSError as error:
                raise ModelError(f"{file} cannot be looked at: {error.strerror}") from None
            found.update(f"{file.name} {facts.st_dev} {facts.st_ino} {facts.st_size} {facts.st_mtime_ns}\0".encode())
        return found.hexdigest()

    def ignored(self, prefixes: Iterable[str]) -> dict[str, Ignored]:
        """By prefix, where there are any: the tensors whose names begin with it."""
        by_prefix = {
            prefix: [entry.num_bytes for name, entry in self.entries.items() if name.startswith(prefix)]
            for prefix in prefixes
        }
        return {prefix: Ignored(len(sizes), sum(sizes)) for prefix, sizes in by_prefix.items() if sizes}

    def check(self, expected: Mapping[str, tuple[int, ...]], ignored_prefixes: tuple[str, ...] = ()) -> None:
        """One ModelError for all tensors that are missing, not expected, misshapen or of an unreadable type."""
        extra = [name for name in self.entries if _is_extra(name, expected) and not name.startswith(ignored_prefixes)]
        faults = [
            _fault("missing", [f"{name} {shape}" for name, shape in expected.items() if name not in self.entries]),
            _fault("not part of this family", extra),
            _fault("misshapen", self._misshapen(expected)),
            _fault("of a type not read", self._unreadable(expected)),
        ]
        if any(faults):
            raise ModelError(
                f"the tensors in {self.model_dir} do not fit its config.json: {'; '.join(filter(None, faults))}. "
                "Expected a whole checkpoint of the configured family with float32, bfloat16 or float16 weights"
            )

    def _misshapen(self, expected: Mapping[str, tuple[int, ...]]) -> list[str]:
        pairs = ((name, self.entries[name].shape, shape) for name, shape in expected.items() if name in self.entries)
        return [f"{name} is {found}, expected {shape}" for name, found, shape in pairs if found != shape]

    def _unreadable(self, expected: Mapping[str, tuple[int, ...]]) -> list[str]:
        pairs = ((name, self.entries[name].dtype) for name in expected if name in self.entries)
        return [f"{name} is {dtype}" for name, dtype in pairs if not _is_readable(name, dtype)]


def _is_readable(name: str, dtype: str) -> bool:
    return dtype == "I64" if name.endswith(BUFFER_NAMES) else dtype in DTYPES


def _is_extra(name: str, expected: Mapping[str, tuple[int, ...]]) -> bool:
    return name not in expected and not name.endswith(HARMLESS_SUFFIXES)


def _fault(what: str, items: list[str]) -> str:
    if not items:
        return ""
    more = f", and {len(items) - MOST_NAMES_SHOWN} more" if len(items) > MOST_NAMES_SHOWN else ""
    return f"{len(items)} {what} ({', '.join(items[:MOST_NAMES_SHOWN])}{more})"


def _read_index(model_dir: Path) -> dict[str, str] | None:
    """Tensor name -> file name, None in a folder without an index."""
    path = model_dir / INDEX_FILE
    if not is_regular_file(path):
        return None
    weight_map = JsonFields.read(path).fields("weight_map")
    names = dict(weight_map.values) if weight_map is not None else {}
    if not names:
        raise ModelError(f"expected weight_map in {path} to map tensors to files, found none. Fetch it again")
    file_names: set[str] = set()
    for name, shard in names.items():
        if isinstance(shard, str) and shard in file_names:
            continue
        if not _is_file_name(shard):
            raise ModelError(
                f"{path}: weight_map: expected the name of a file in this folder for tensor {name[:80]!r}, without "
                f"separators, got {str(shard)[:80]!r}. Fetch it again"
            )
        file_names.add(shard)
    if (model_dir / SINGLE_FILE).exists() and SINGLE_FILE not in names.values():
        raise ModelError(f"{model_dir} holds {SINGLE_FILE} and an index that does not name it. Remove the stale one")
    return names


def _is_file_name(shard: object) -> bool:
    """A shard lies in the model's folder: no path leads elsewhere, on any system."""
    if not isinstance(shard, str) or shard in ("", ".", "..") or set(shard) & set("/\\\0"):
        return False
    return len(shard.encode(errors="surrogatepass")) <= MAX_FILE_NAME_BYTES


def _shard_files(model_dir: Path, index: Mapping[str, str]) -> tuple[Path, ...]:
    files = tuple(model_dir / shard for shard in sorted(set(index.values())))
    missing = _fault("of its files missing", [file.name for file in files if not is_regular_file(file)])
    if missing:
        raise ModelError(f"{model_dir / INDEX_FILE}: {missing}. Fetch the rest of the checkpoint")
    return files


def _single_file(model_dir: Path) -> Path:
    file = model_dir / SINGLE_FILE
    if is_regular_file(file):
        return file
    others = _names(model_dir.glob("*.bin")) or _names(model_dir.glob("*.pt")) or _names(model_dir.glob("*.pth"))
    found = f"only {others}, which unpickling would have to execute" if others else "no weights"
    raise ModelError(
        f"expected {SINGLE_FILE} or {INDEX_FILE} in {model_dir}, found {found}. Fetch the safetensors files"
    )


def _names(paths: Iterable[Path]) -> str:
    return ", ".join(sorted(path.name for path in paths)[:MOST_NAMES_SHOWN])


def _read_header(file: Path) -> dict[str, TensorEntry]:
    """safetensors checks here that the header's offsets fill the file to its last byte; it does not tell them."""
    try:
        with safe_open(file, framework="np") as tensors:
            names = list(tensors.keys())
        length_bytes, header = _header_bytes(file)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is damaged or cut short: {error}. Fetch the file again") from None
    fields = json.loads(header)
    first = len(length_bytes) + len(header)
    entries = {}
    for name in names:
        tensor = fields[name]
        begin, end = tensor["data_offsets"]
        entries[name] = TensorEntry(tensor["dtype"], tuple(tensor["shape"]), file, first + begin, end - begin)
    return entries


def _header_bytes(file: Path) -> tuple[bytes, bytes]:
    """The eight bytes with the header's length, and the header."""
    with file.open("rb") as stream:
        length_bytes = stream.read(8)
        return length_bytes, stream.read(int.from_bytes(length_bytes, "little"))


def _digest(model_dir: Path, files: Iterable[Path]) -> str:
    digest = hashlib.sha256((model_dir / "config.json").read_bytes())
    for file in files:
        length_bytes, header = _header_bytes(file)
        digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode() + length_bytes + header)
    return digest.hexdigest()
