"""Finds out by trying whether a model's steps can be recorded: a graph repeats what the device did,
so the host must not look at what is computed."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from services.worker.engine.device.device_slots import DeviceSlots
from services.worker.engine.device.segments import make_segments
from services.worker.engine.device.warm_up import padding_step
from services.worker.slots.table import SlotTable
from services.worker.startup.loaded_model import LoadedModel

NO_BLOCKS = 0
READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
INDEXES = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default}
MASKS = {torch.bool, torch.uint8}


@torch.no_grad()  # in inference mode operators that are made of others are not seen as these
def why_not_recordable(loaded: LoadedModel) -> str:
    """Runs a step of one row over a cache that has only the null block. Returns what the host
    asks of it, or nothing."""
    capacity = loaded.capacity(NO_BLOCKS)
    slots = DeviceSlots(capacity, SlotTable(capacity), loaded.eos_ids, loaded.device)
    step = padding_step(make_segments(loaded, slots.state, NO_BLOCKS), 1, 1)
    step.forward()  # what is compiled or set up once may look
    try:
        with _looking_is_an_error(loaded.device):
            step.forward()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    finally:
        torch.cuda.empty_cache()  # what is measured next begins without it
    return ""


@contextmanager
def _looking_is_an_error(device: torch.device) -> Iterator[None]:
    """RuntimeError where the host waits for a value: of an operator's name, or on a GPU wherever
    torch waits."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        with _Watch():  # type: ignore[no-untyped-call] # torch's constructor has no types
            yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


class _Watch(TorchDispatchMode):
    """Sees every operator that is called. Those of torch that stand for our kernels on a CPU may
    read: the kernels do not."""

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _reads(operator, args) and not _is_called_by("kernels."):
            raise RuntimeError(f"{operator} needs values that are on the device")
        return operator(*args, **(kwargs or {}))


def _reads(operator: Any, args: Any) -> bool:
    """An index that is a mask is read to know how many numbers it picks."""
    if operator in INDEXES:
        indices = [each for each in args[1] if isinstance(each, Tensor)]
        return any(each.dtype in MASKS for each in indices)
    return not READS.isdisjoint(operator.tags)


def _is_called_by(prefix: str) -> bool:
    """A function of a module of that name is running."""
    frames = traceback.walk_stack(None)
    return any(frame.f_globals.get("__name__", "").startswith(prefix) for frame, _ in frames)
