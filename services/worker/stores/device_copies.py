"""Copies between a device and memory of the host, next to its steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.pieces import pack, unpack
from kernels.pieces.layout import Pieces
from services.worker.machine.streams import upload

NUM_BUFFERS = 4  # for the saves and the loads of two plans
BUFFER_BYTES = 16 << 20  # of the copies of a plan, or one block or state

Wait = Callable[[], None]


class Streams(Protocol):
    """Copies one after the other, each way, while steps run."""

    def download(self, source: Tensor, target: Tensor) -> Wait:
        """Begins after all work that was launched so far; ends before the returned call does."""

    def upload(self, source: Tensor, target: Tensor) -> None:
        """Begins at once; later work sees the copy."""

    def mark(self) -> Wait:
        """The returned call ends after all work that was launched so far."""


class CudaStreams:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def download(self, source: Tensor, target: Tensor) -> Wait:
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            target.copy_(source, non_blocking=True)
            return self.mark()

    def upload(self, source: Tensor, target: Tensor) -> None:
        with torch.cuda.stream(self._up):
            target.copy_(source, non_blocking=True)
        torch.cuda.current_stream(self._device).wait_stream(self._up)

    def mark(self) -> Wait:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize


class CpuStreams:
    """A copy to the host is made late, when it is waited for: as late as on a GPU it may be."""

    def download(self, source: Tensor, target: Tensor) -> Wait:
        return partial(_copy, source, target)

    def upload(self, source: Tensor, target: Tensor) -> None:
        _copy(source, target)

    def mark(self) -> Wait:
        return lambda: None


@dataclass(eq=False)
class Buffer:
    """Packed rows: [bytes] uint8 each. ``until_free`` ends after the last copy from or to it."""

    on_device: Tensor
    on_host: Tensor  # pinned next to a GPU
    until_free: Wait = lambda: None

    def rows(self, pieces: Pieces, num: int) -> list[memoryview]:
        """The host's memory of each row."""
        content: np.ndarray = pieces.packed(num, self.on_host).view(torch.uint8).numpy()
        return [row.data for row in content]


class DeviceCopies:
    """Copies of packed rows, of at most ``row_bytes`` each, in ``NUM_BUFFERS`` buffers. Copies are
    launched on the thread of the steps. Raises torch.OutOfMemoryError."""

    def __init__(self, device: torch.device, row_bytes: int) -> None:
        is_cuda = device.type == "cuda"
        self._device = device
        self._streams: Streams = CudaStreams(device) if is_cuda else CpuStreams()
        self._free: SimpleQueue[Buffer] = SimpleQueue()
        self._num_bytes = buffer_bytes(row_bytes)
        for _ in range(NUM_BUFFERS):
            memory = torch.empty(self._num_bytes, dtype=torch.uint8, device=device)
            host = torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
            self._free.put(Buffer(memory, host))

    def most(self, pieces: Pieces) -> int:
        """The rows that a buffer has room for."""
        return self._num_bytes // pieces.row_bytes

    def take(self) -> Buffer:
        """Waits for a free one."""
        buffer = self._free.get()
        buffer.until_free()
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        self._free.put(buffer)

    def fetch(self, pieces: Pieces, rows: Sequence[int], buffer: Buffer) -> Wait:
        """Packs ``rows`` as they are after all steps launched so far; the host has them after the
        returned call."""
        packed = pieces.packed(len(rows), buffer.on_device)
        pack(pieces, self._places(rows), packed)
        num = len(rows) * pieces.row_bytes
        return self._streams.download(buffer.on_device[:num], buffer.on_host[:num])

    def put(self, pieces: Pieces, *targets: Sequence[int], buffer: Buffer) -> None:
        """Steps launched later find the host's rows at the rows of each of ``targets``."""
        num = len(targets[0])
        num_bytes = num * pieces.row_bytes
        self._streams.upload(buffer.on_host[:num_bytes], buffer.on_device[:num_bytes])
        for rows in targets:
            unpack(pieces, self._places(rows), pieces.packed(num, buffer.on_device))
        buffer.until_free = self._streams.mark()

    def _places(self, rows: Sequence[int]) -> Tensor:
        return upload(np.array(rows, np.int64), self._device)


def buffer_bytes(row_bytes: int) -> int:
    return max(BUFFER_BYTES, row_bytes)


@torch.inference_mode()
def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)
