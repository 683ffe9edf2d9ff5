"""The cores available to this process, and their NUMA nodes."""

import ctypes
import os
from contextlib import suppress
from pathlib import Path
from threading import get_native_id
from typing import NamedTuple

from shared.errors import ConfigError

CGROUPS = Path("/sys/fs/cgroup")
CGROUP_NAMES = Path("/proc/self/cgroup")
NODES = Path("/sys/devices/system/node")
_SET_MEMPOLICY = 238  # on x86-64
_MPOL_BIND = 2
_MASK_WORDS = 16  # 64 nodes each
_MORE_NICE = 10


class NumaNode(NamedTuple):
    """A node's memory and the available cores near it."""

    number: int
    cores: frozenset[int]


def num_cores() -> int:
    """The number of available cores, at least 1."""
    return min(len(os.sched_getaffinity(0)), _cpu_quota())


def lower_priority() -> None:
    """Of the calling thread, and of threads it starts later: the others of this process come
    first."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, get_native_id(), os.nice(0) + _MORE_NICE)


def numa_nodes() -> list[NumaNode]:
    """Nodes with available cores; empty if the system lists none."""
    ours = os.sched_getaffinity(0)
    nodes = []
    for number in sorted(parse_cpu_list(read_text(NODES / "online"))):
        cores = ours & parse_cpu_list(read_text(NODES / f"node{number}" / "cpulist"))
        if cores:
            nodes.append(NumaNode(number, frozenset(cores)))
    return nodes


def bind_to_node(number: int) -> str | None:
    """Binds the calling thread, and threads it starts later, to the cores and memory of a NUMA
    node. Returns the reason if memory could not be bound; the system then allocates near the thread
    that writes first. Raises ConfigError if there is no such node."""
    nodes = {node.number: node for node in numa_nodes()}
    if number not in nodes:
        known = ", ".join(map(str, nodes)) or "none"
        raise ConfigError(f"numa-node: {number}; the nodes with cores of ours are {known}")
    os.sched_setaffinity(0, nodes[number].cores)
    if (machine := os.uname().machine) != "x86_64":
        return f"not known how on {machine}"
    mask = (ctypes.c_uint64 * _MASK_WORDS)()
    mask[number // 64] = 1 << number % 64
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_SET_MEMPOLICY, _MPOL_BIND, mask, 64 * _MASK_WORDS):
        return os.strerror(ctypes.get_errno())
    return None


def parse_cpu_list(text: str) -> set[int]:
    """Numbers and ranges as the kernel writes them: 0-3,8."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def cgroup_folders(controller: str) -> list[Path]:
    """This process's cgroup and its parents; ``controller`` is empty for version 2.

    In a container the path may be the host's; a missing file reads as empty.
    """
    for line in read_text(CGROUP_NAMES).splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            root = CGROUPS / controller
            own = root / path.lstrip("/")
            return [own, *(parent for parent in own.parents if parent.is_relative_to(root))]
    return []


def read_text(path: Path) -> str:
    """The file's text; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _cpu_quota() -> int:
    """The cores allowed by cgroup quotas, at least 1."""
    cores = float("inf")
    for folder in cgroup_folders(""):
        quota, _, period = read_text(folder / "cpu.max").partition(" ")
        if quota.isdigit():
            cores = min(cores, int(quota) / int(period))
    for folder in cgroup_folders("cpu"):
        quota = read_text(folder / "cpu.cfs_quota_us")
        period = read_text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, int(quota) / int(period))
    return max(1, int(min(cores, os.cpu_count() or 1)))
