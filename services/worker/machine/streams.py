"""Transfers between host and device that block neither."""

import time
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.sizes import ALIGNED, cdiv


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy that later work on the device finds there."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor.to(device, copy=True)
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_rows(*rows: np.ndarray, device: torch.device) -> Tensor:
    """Arrays of one length and type in one copy. Each begins at an aligned place, independent of
    the length."""
    length = len(rows[0])
    padded = np.zeros((len(rows), cdiv(length, ALIGNED) * ALIGNED), rows[0].dtype)
    padded[:, :length] = rows
    return upload(padded, device)[:, :length]


class Fetched(Protocol):
    """Arrays on their way to the host."""

    def wait(self) -> list[np.ndarray]: ...


class OnHost:
    """``tensors`` of the host, which nothing changes until they are read."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors

    def wait(self) -> list[np.ndarray]:
        return [tensor.numpy() for tensor in self._tensors]


class Download:
    """Copies of ``tensors`` as they are when the device comes so far."""

    def __init__(self, *tensors: Tensor) -> None:
        self._copies = [_copy(tensor) for tensor in tensors]
        self._event = DeviceEvent(tensors[0].device)

    def wait(self) -> list[np.ndarray]:
        self._event.wait()
        return [copy.numpy() for copy in self._copies]


class DeviceEvent:
    """A CUDA event after the work that was launched so far; on a CPU a timestamp."""

    def __init__(self, device: torch.device) -> None:
        self._at_s = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True, blocking=True)
            self._event.record()

    def wait(self) -> None:
        """Others run meanwhile."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, other: "DeviceEvent") -> float:
        """Seconds, when both were waited for."""
        if self._event is None or other._event is None:
            return self._at_s - other._at_s
        elapsed_ms: float = other._event.elapsed_time(self._event)
        return elapsed_ms / 1000


def _copy(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor.clone()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
