"""A row of the kernel table: an operator beside torch's, and beside what its bytes take."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from benchmarks.gpu.precision import as_torch_has_it
from benchmarks.gpu.suite import Suite
from benchmarks.gpu.timing import Run, seconds

MAX_COPIES = 64


class Case(NamedTuple):
    """``make`` gives runs of ours, and of torch's where there is such, each on other memory.
    ``num_bytes`` are what must be moved, ``num_flops`` what must be computed."""

    kernel: str
    shape: str
    make: Callable[[], tuple[list[Run], list[Run]]]
    num_bytes: int
    num_flops: int = 0
    peer: str = ""
    compares: bool = False  # ours and torch's are one result


def measure(case: Case, suite: Suite, read_gb_per_s: float | None) -> dict[str, Any]:
    ours, theirs = case.make()
    found: dict[str, Any] = {"kernel": case.kernel, "shape": case.shape, "peer": case.peer}
    time_s = seconds(ours, suite.device)
    found |= {"us": time_s * 1e6, "GB_per_s": case.num_bytes / time_s / 1e9}
    if read_gb_per_s is not None:
        found["share_of_bandwidth"] = found["GB_per_s"] / read_gb_per_s
    if case.num_flops:
        found["TFLOP_per_s"] = case.num_flops / time_s / 1e12
    if case.compares:
        found["difference"] = _difference(ours[0], theirs[0])
    if theirs:
        with as_torch_has_it():
            peer_s = seconds(theirs, suite.device)
        found |= {"peer_us": peer_s * 1e6, "times_the_peer": peer_s / time_s}
    return found


def num_copies(suite: Suite, num_bytes: int) -> int:
    """So many of them are more than the caches hold."""
    return max(1, min(MAX_COPIES, -(-suite.rotated_bytes // num_bytes)))


@torch.inference_mode()
def _difference(ours: Run, theirs: Run) -> float:
    """The norm of it over the norm of torch's."""
    one, other = (cast(Tensor, run()).float().flatten() for run in (ours, theirs))
    return float(torch.linalg.vector_norm(one - other) / torch.linalg.vector_norm(other))
