"""The head of docs/numerics.md section 7: greedy choice, and rows that are not finite."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
Bool = NDArray[np.bool_]


def argmax(logits: F32) -> tuple[F32, I32]:
    """[M, V] -> (value [M], id [M]); ties go to the lower id (+0.0 and -0.0 tie); a row of NaN gives id 0."""
    ids = np.zeros(logits.shape[0], dtype=np.int32)
    for row, values in enumerate(logits):
        for i in range(1, len(values)):
            if values[i] > values[ids[row]]:
                ids[row] = i
    return logits[np.arange(len(ids)), ids], ids


def nonfinite_rows(x: F32) -> Bool:
    """[M, N] -> [M]: an exponent field of all ones is an infinity or a NaN."""
    exponent_field = (x.view(np.uint32) >> 23) & 0xFF
    return np.array([any(row == 0xFF) for row in exponent_field], dtype=np.bool_)
