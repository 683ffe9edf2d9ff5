"""The processor of this machine."""

from collections.abc import Iterable
from pathlib import Path

from shared.process.cores import read_text

CPUINFO = Path("/proc/cpuinfo")


def cpu_field(name: str) -> str:
    """A field of /proc/cpuinfo for the first core; empty if it is missing."""
    fields = (line.partition(":") for line in read_text(CPUINFO).splitlines())
    return next((text.strip() for key, _, text in fields if key.strip() == name), "")


def cpu_features(names: Iterable[str]) -> list[str]:
    """The names that the cores support."""
    flags = set(cpu_field("flags").split())
    return [name for name in names if name in flags]
