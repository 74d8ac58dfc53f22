"""Hashes of the residual of every row after every layer, U64 little-endian [rows, layers], and where two part."""

from __future__ import annotations

HASH_BYTES = 8
"""Of one hash."""


def num_layers_of(layer_hashes: bytes, num_rows: int) -> int:
    return len(layer_hashes) // (HASH_BYTES * max(1, num_rows))


def first_difference(mine: bytes, theirs: bytes, num_layers: int) -> tuple[int, int] | None:
    """(row, layer) of the first hash that differs, in row order; None where none does in what both have."""
    for begin in range(0, min(len(mine), len(theirs)), HASH_BYTES):
        if mine[begin : begin + HASH_BYTES] != theirs[begin : begin + HASH_BYTES]:
            row, layer = divmod(begin // HASH_BYTES, num_layers)
            return row, layer
    return None
