"""Copies from the host to a device, concurrent with its computation."""

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

Wait = Callable[[], object]


class CopyStream(Protocol):
    """Copies one after the other."""

    def copy(self, source: Tensor, destination: Tensor) -> Wait:
        """Begins after all work launched so far. Work that is launched after a call of the returned
        function sees the copy."""


class CudaCopyStream:
    """A stream of its own: within a capture of a graph its copies and waits become parts of it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def copy(self, source: Tensor, destination: Tensor) -> Wait:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            destination.copy_(source, non_blocking=True)
            event = self._stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(event)


class CpuCopyStream:
    """A thread, because work launched on a CPU is complete when the call returns."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "copies")

    def copy(self, source: Tensor, destination: Tensor) -> Wait:
        return self._thread.submit(destination.copy_, source).result


def make_copy_stream(device: torch.device) -> CopyStream:
    return CudaCopyStream(device) if device.type == "cuda" else CpuCopyStream()


def pin(memory: Tensor, owner: object) -> str:
    """Page-locks ``memory`` until ``owner`` is gone, so that a GPU copies from it by itself.
    Returns why it cannot be, or nothing.

    Memory that torch pins would be a power of two in size.
    """
    runtime = torch.cuda.cudart()
    error = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if error != runtime.cudaError.success:
        with suppress(RuntimeError):  # the next launch would be blamed for it
            torch.zeros(1, device="cuda")
        return str(runtime.cudaGetErrorString(error))
    weakref.finalize(owner, _unpin, memory.data_ptr())
    return ""


def _unpin(address: int) -> None:
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)
