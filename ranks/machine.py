"""What the machine says of itself, and the kernel of a process."""

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


def stat_fields(stat: Path) -> list[str]:
    """proc(5), /proc/PID/stat (or that of one of its threads): the fields after the name, which may hold anything.

    The first is the state's letter. Raises OSError where the process has ended.
    """
    return stat.read_text().rpartition(")")[2].split()
