"""A row of the kernel table: an operator compared with torch's and with the time of its memory
traffic."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from benchmarks.gpu.precision import as_torch_has_it
from benchmarks.gpu.suite import Suite
from benchmarks.gpu.switches import Change, changed
from benchmarks.gpu.timing import Run, seconds

MAX_COPIES = 64


class Case(NamedTuple):
    """``make`` returns runs of ours and of torch's (if any), each on other memory. ``num_bytes``
    must be moved, ``num_flops`` computed."""

    kernel: str
    shape: str
    make: Callable[[], tuple[list[Run], list[Run]]]
    num_bytes: int
    num_flops: int = 0
    peer: str = ""
    compares: bool = False  # both results must agree


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


def changed_case(case: Case, change: Change) -> Case:
    """Our runs alone, launched with ``change``."""

    def make() -> tuple[list[Run], list[Run]]:
        return [partial(_run_changed, run, change) for run in case.make()[0]], []

    kernel = f"{case.kernel}, {change.what}"
    return case._replace(kernel=kernel, make=make, peer="", compares=False)


def _run_changed(run: Run, change: Change) -> object:
    with changed(change):
        return run()


def num_copies(suite: Suite, num_bytes: int) -> int:
    """The number of copies that exceeds the caches."""
    return max(1, min(MAX_COPIES, -(-suite.rotated_bytes // num_bytes)))


@torch.inference_mode()
def _difference(ours: Run, theirs: Run) -> float:
    """The norm of the difference over the norm of torch's result."""
    one, other = (cast(Tensor, run()).float().flatten() for run in (ours, theirs))
    return float(torch.linalg.vector_norm(one - other) / torch.linalg.vector_norm(other))
