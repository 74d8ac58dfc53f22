"""Typed reading of a model folder's JSON: what is missing or of the wrong kind is a ModelError that names the field."""

from __future__ import annotations

import json
import math
import os
import reprlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelError

REQUIRED: Any = object()

_shown = reprlib.Repr()
_shown.maxstring = _shown.maxlong = _shown.maxother = 120


def is_regular_file(path: Path) -> bool:
    """False where nothing is there. ModelError for what is there but no file: opening a FIFO would wait for ever."""
    if os.path.isfile(path):
        return True
    if os.path.lexists(path):
        kind = "a folder" if os.path.isdir(path) else "something else (a FIFO, a device or a broken link)"
        raise ModelError(f"expected a regular file at {path}, found {kind}. Remove it or fetch the file again")
    return False


@dataclass(frozen=True, slots=True)
class JsonFields:
    """An object of a JSON file. A field that is null counts as absent."""

    path: Path
    values: Mapping[str, Any]
    prefix: str = ""

    @classmethod
    def read(cls, path: Path) -> JsonFields:
        try:
            is_regular_file(path)
            values = json.loads(path.read_bytes())
        except OSError as error:
            raise ModelError(
                f"cannot read {path}: {error.strerror or error}. Give the folder of a whole model"
            ) from None
        except (ValueError, RecursionError) as error:
            raise ModelError(f"expected JSON in {path}, got something else: {error}. Fetch the file again") from None
        if not isinstance(values, dict):
            raise ModelError(f"expected a JSON object in {path}, got {type(values).__name__}. Fetch the file again")
        return cls(path, values)

    def wrong(self, name: str, expected: str) -> ModelError:
        found = f"got {_shown.repr(self.values[name])}" if self.values.get(name) is not None else "it is not there"
        return ModelError(f"{self.path}: field {self.prefix}{name}: expected {expected}, {found}")

    def unsupported(self, name: str, supported: str) -> ModelError:
        found = _shown.repr(self.values.get(name))
        return ModelError(
            f"{self.path}: {self.prefix}{name} = {found} is not supported; supported: {supported}. It would need a "
            "kernel of its own, so the model is refused instead of computed without it"
        )

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, default: Any = REQUIRED, *, minimum: int = 1, maximum: int) -> int:
        """Up to `maximum`: every count has one, or a mistyped file would make its reader loop for hours."""
        expected = f"an integer of at least {minimum:,} and at most {maximum:,}"
        value = self._get(name, default, expected)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.wrong(name, expected)
        return value

    def number(self, name: str, default: Any = REQUIRED, *, below: float = math.inf) -> float:
        """A number that is above zero and under `below` once it is rounded to FP32; returned as written."""
        expected = f"a number above zero and {'finite' if below == math.inf else f'below {below:g}'} in FP32"
        value = self._get(name, default, expected)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < _fp32(value) < below:
            raise self.wrong(name, expected)
        return float(value)

    def boolean(self, name: str, default: Any = REQUIRED) -> bool:
        value = self._get(name, default, "true or false")
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: Any = REQUIRED) -> str:
        value = self._get(name, default, "a string")
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """One integer or a list of them, none below zero; absent: no integers."""
        value = self._get(name, [], "an integer or a list of integers")
        items = value if isinstance(value, list) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in items):
            raise self.wrong(name, "an integer or a list of integers, none below zero")
        return tuple(items)

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; absent: none."""
        value = self._get(name, [], "a list of strings")
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(name, "a list of strings")
        return tuple(value)

    def fields(self, name: str) -> JsonFields | None:
        """A nested object, None where it is absent."""
        if not self.has(name):
            return None
        if not isinstance(self.values[name], dict):
            raise self.wrong(name, "an object")
        return JsonFields(self.path, self.values[name], f"{self.prefix}{name}.")

    def _get(self, name: str, default: Any, expected: str) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is REQUIRED:
            raise self.wrong(name, expected)
        return default


def _fp32(value: float) -> float:
    """Nearest FP32 value of an int or float, infinity where it is beyond them."""
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", float(value)))[0]
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    return rounded
