"""The version of the numeric contract, and what every rank and receipt must agree on besides the weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from ..collectives.control_names import NO_CONTROL

NUMERICS_VERSION = 1
"""Version of docs/numerics.md, part of every settings digest: a change of any bit changes it."""

HASH_MODULUS = 2**64
"""Residual hashes are sums modulo this (docs/numerics.md section 8)."""


def settings_digest(numeric: Mapping[str, object]) -> str:
    """SHA-256 (hex) over the numeric settings by name, and the version of the numeric contract.

    A control enters only where there is one: runs that prove nothing about it keep their digest.
    """
    entering = {name: value for name, value in numeric.items() if (name, value) != ("control", NO_CONTROL)}
    text = json.dumps({"numerics": NUMERICS_VERSION, **entering}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
