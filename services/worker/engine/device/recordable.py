"""Runs a trial step to find out if a model can be recorded. A graph replays the device's work only,
so the host must not read computed values."""

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from services.worker.engine.device.device_slots import DeviceSlots
from services.worker.engine.device.segments import make_trial_segments
from services.worker.engine.device.warm_up import padding_step
from services.worker.slots.table import SlotTable
from services.worker.startup.loaded_model import LoadedModel

READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
INDEXES = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default}
MASKS = {torch.bool, torch.uint8}


@torch.no_grad()  # inference mode does not decompose composite operators
def why_not_recordable(loaded: LoadedModel) -> str:
    """Runs a step of one row over a cache with only the null block. Returns the first read of the
    host, or an empty string."""
    capacity = loaded.limits
    slots = DeviceSlots(capacity, SlotTable(capacity), loaded.eos_ids, loaded.device)
    step = padding_step(make_trial_segments(loaded, slots.state), 1, 1)
    step.forward()  # compilation and one-time set-up may read values
    try:
        with _reads_raise(loaded.device):
            step.forward()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    finally:
        torch.cuda.empty_cache()  # later measurements must not include it
    return ""


@contextmanager
def _reads_raise(device: torch.device) -> Iterator[None]:
    """Raises RuntimeError if an operator reads a value on the host; on a GPU, at any point where
    torch synchronizes."""
    _set_sync_mode(device, "error")
    try:
        with _Watch():  # type: ignore[no-untyped-call] # torch's constructor has no types
            yield
    finally:
        _set_sync_mode(device, "default")


def _set_sync_mode(device: torch.device, mode: str) -> None:
    if device.type == "cuda":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode(mode)


class _Watch(TorchDispatchMode):
    """Checks every operator call. On a CPU torch's operators replace our kernels and may read
    values; the kernels do not."""

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _reads(operator, args) and not _is_called_by("kernels."):
            raise RuntimeError(f"{operator} needs values that are on the device")
        return operator(*args, **(kwargs or {}))


def _reads(operator: Any, args: Any) -> bool:
    """An index with a mask reads the number of elements it selects."""
    if operator in INDEXES:
        indices = [each for each in args[1] if isinstance(each, Tensor)]
        return any(each.dtype in MASKS for each in indices)
    return not READS.isdisjoint(operator.tags)


def _is_called_by(prefix: str) -> bool:
    """True if a function of a module with this prefix is running."""
    frames = traceback.walk_stack(None)
    return any(frame.f_globals.get("__name__", "").startswith(prefix) for frame, _ in frames)
