"""What the machine says of itself."""

from __future__ import annotations

from pathlib import Path


def cpu_name() -> str:
    """The model name, on arm64 (where /proc/cpuinfo has none) the implementer and part numbers."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    if "model name" in fields:
        return fields["model name"]
    return f"implementer {fields.get('CPU implementer', '?')} part {fields.get('CPU part', '?')}"
