"""The number of workers that ``shoal serve`` starts."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from shared.process.cores import NumaNode

DEVICES = Path("/dev")
MAX_WORKERS = 64


def num_gpus() -> int:
    """The number of visible NVIDIA GPUs, without the driver's libraries."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([each for each in visible.split(",") if each.strip() not in ("", "-1")])
    return len([each for each in DEVICES.iterdir() if re.fullmatch(r"nvidia\d+", each.name)])


def choose_num_workers(num_gpus: int, nodes: Sequence[NumaNode]) -> int:
    """One worker per GPU, else per NUMA node, since a step waits for weights in the memory of
    another node."""
    return min(MAX_WORKERS, max(1, num_gpus or len(nodes)))
