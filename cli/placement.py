"""Which part of the machine each worker of ``shoal serve`` has."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from shared.cores import NumaNode

DEVICES = Path("/dev")
MAX_WORKERS = 64


def num_gpus() -> int:
    """Counts the GPUs of NVIDIA that we may see, without a driver's help."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([each for each in visible.split(",") if each.strip() not in ("", "-1")])
    return len([each for each in DEVICES.iterdir() if re.fullmatch(r"nvidia\d+", each.name)])


def choose_num_workers(num_gpus: int, nodes: Sequence[NumaNode]) -> int:
    """Returns one for each GPU, else for each NUMA node: a step whose weights lie in the memory of
    another node waits for them."""
    return min(MAX_WORKERS, max(1, num_gpus or len(nodes)))


def place_workers(
    num_workers: int, num_gpus: int, nodes: Sequence[NumaNode], num_cores: int
) -> list[dict[str, str]]:
    """Returns the settings of each worker: its threads where several share the cores, and its node
    where there are several and no GPU computes. A single worker has the whole machine."""
    if num_workers == 1:
        return [{}]
    share = max(1, num_cores // num_workers)
    if num_gpus or len(nodes) < 2:
        return [{"SHOAL_NUM_THREADS": str(share)}] * num_workers
    places = []
    for index in range(num_workers):
        place = index % len(nodes)
        num_beside = len(range(place, num_workers, len(nodes)))
        num_threads = max(1, min(share, len(nodes[place].cores) // num_beside))
        places.append(
            {
                "SHOAL_NUM_THREADS": str(num_threads),
                "SHOAL_NUMA_NODE": str(nodes[place].number),
            }
        )
    return places
