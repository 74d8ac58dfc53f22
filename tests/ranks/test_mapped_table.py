"""Rows of an n-gram table come out of its files as they are stored, wherever its shards lie."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from bits import assert_same_bits
from leafsum.errors import ModelError
from leafsum.ranks.checkpoint import TensorEntry
from leafsum.ranks.mapped_table import MappedTable

STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
WIDTH = 6
LENGTHS = (4, 1, 7, 2)
"""Of shards."""
ROW_IDS = [13, 0, 4, 4, 3, 5, 11, 12, 0]
"""The first and last rows of shards, in no order, some twice."""


def shards(dtypes: Sequence[str]) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    lengths = zip(LENGTHS, dtypes, strict=True)
    return [torch.randn((rows, WIDTH), generator=random).to(STORED[dtype]) for rows, dtype in lengths]


def write(folder: Path, tables: Sequence[torch.Tensor], per_file: int) -> list[TensorEntry]:
    """Shards one behind the other in files, at odd offsets as a header of any length leaves them."""
    entries = []
    for index, table in enumerate(tables):
        file = folder / f"{index // per_file}"
        data = table.view(torch.uint8).numpy().tobytes()
        with file.open("ab") as stream:
            stream.write(b"\0" if index % per_file == 0 else b"")
            offset = stream.tell()
            stream.write(data)
        name = next(name for name, dtype in STORED.items() if dtype == table.dtype)
        entries.append(TensorEntry(name, tuple(table.shape), file, offset, len(data)))
    return entries


@pytest.mark.parametrize("per_file", [1, 3, 4])
@pytest.mark.parametrize("dtypes", [("F32",) * 4, ("BF16",) * 4, ("F16",) * 4, ("BF16", "F16", "F32", "BF16")])
def test_rows_are_those_stored(tmp_path: Path, dtypes: Sequence[str], per_file: int) -> None:
    tables = shards(dtypes)
    table = MappedTable(write(tmp_path, tables, per_file))
    whole = torch.cat([shard.float() for shard in tables])
    assert_same_bits(table.rows(np.array(ROW_IDS)).numpy(), whole[ROW_IDS].numpy())
    assert table.rows(np.arange(0)).shape == (0, WIDTH)


def test_a_file_is_open_once_however_many_shards_it_holds(tmp_path: Path) -> None:
    """A published table has 512 shards, and a process by default 1024 descriptors."""
    entries = write(tmp_path, shards(("BF16",) * 4), 2)
    table = MappedTable(entries)
    opened = [link.resolve() for link in Path("/proc/self/fd").iterdir()]
    assert sum(file.parent == tmp_path for file in opened) == 2
    assert len(table.rows(np.arange(sum(LENGTHS)))) == sum(LENGTHS)


def test_a_file_that_cannot_be_mapped_is_named(tmp_path: Path) -> None:
    entries = write(tmp_path, shards(("BF16",) * 4), 4)
    entries[0].file.unlink()
    with pytest.raises(ModelError, match=r"cannot map .*/0 into memory: No such file .* Check that it can be read"):
        MappedTable(entries)
