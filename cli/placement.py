"""How many workers ``shoal serve`` starts."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from shared.process.cores import NumaNode

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
