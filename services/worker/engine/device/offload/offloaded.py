"""Layers with weights in host memory, which each forward pass copies to the device."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels.cpu.memory import huge_zeros
from services.worker.engine.device.offload.copies import Wait, make_copy_stream, pin
from services.worker.layers.experts import Experts
from services.worker.machine.streams import DeviceEvent

ALIGNMENT = 256  # bytes, as a device's allocator has it
NUM_BUFFERS = 2


class _Place(NamedTuple):
    """The place in an arena of a weight, the attribute ``name`` of ``module``."""

    module: nn.Module
    name: str
    is_parameter: bool
    dtype: torch.dtype
    shape: torch.Size
    start: int

    def of(self, memory: Tensor) -> Tensor:
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        return memory[self.start : self.start + num_bytes].view(self.dtype).view(self.shape)


class Arena:
    """Moves the weights of ``layer`` into one piece of host memory, one after the other."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self._places, num_bytes = _places(layer)
        self.memory = huge_zeros(num_bytes)  # [num_bytes] uint8
        for place in self._places:
            place.of(self.memory).copy_(getattr(place.module, place.name))
        self.show(self.memory)

    def show(self, memory: Tensor) -> None:
        """Makes the layer's weights views of ``memory``, without copying anything."""
        for place in self._places:
            part = place.of(memory)
            shown = nn.Parameter(part, requires_grad=False) if place.is_parameter else part
            setattr(place.module, place.name, shown)
        for module in self.layer.modules():
            if isinstance(module, Experts) and module.stacks is not None:
                module.find_stacks()


class OffloadedLayers:
    """Copies the weights of some of the trunk's layers to the device ahead of their turn.

    Two buffers there take turns: while one layer is computed from one buffer, the next layer is
    copied into the other. A copy into a buffer waits for the layer that used it before, and a layer
    waits for its copy. Layers between them do not wait.
    """

    def __init__(
        self, trunk: Sequence[nn.Module], arenas: Sequence[Arena], device: torch.device
    ) -> None:
        """``arenas`` hold layers of ``trunk``, in its order; their weights become parts of the
        buffers. Raises torch.OutOfMemoryError."""
        self.num_layers, self.num_trunk_layers = len(arenas), len(trunk)
        self.step_bytes = sum(len(arena.memory) for arena in arenas)
        self._first = trunk[0]
        self._turns = {arena.layer: turn for turn, arena in enumerate(arenas)}
        self._device = device
        self._stream = make_copy_stream(device)
        size = max(len(arena.memory) for arena in arenas)
        self._buffers = [
            torch.empty(size, dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)
        ]
        self._arenas = arenas
        for turn, arena in enumerate(arenas):
            arena.show(self._buffer(turn))
        self._waits: list[Wait] = []  # of the pass that runs, one for each copy
        self._current: int | None = None  # turn of the layer that is computed, if it has one
        self.why_not_pinned = self._pin() if device.type == "cuda" else ""

    @property
    def buffer_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def weight_bytes(self) -> int:
        """The bytes of all tensors in the buffers."""
        return sum(tensor.nbytes for layer in self._turns for _, _, tensor in _weights(layer))

    def enter(self, layer: nn.Module) -> None:
        """Marks the next launches as ``layer``'s; every forward pass enters each layer of the
        trunk. Unfinished work of an earlier pass is forgotten."""
        if layer is self._first:
            self._waits = []
            for turn in range(NUM_BUFFERS):
                self._begin(turn)
        elif self._current is not None:
            self._begin(self._current + NUM_BUFFERS)
        self._current = self._turns.get(layer)
        if self._current is not None:
            self._waits[self._current]()

    def measure(self) -> float:
        """Seconds for the copies of a pass without concurrent computation."""
        started = DeviceEvent(self._device)
        for turn in range(self.num_layers):
            self._copy(turn)()
        ended = DeviceEvent(self._device)
        ended.wait()
        return ended.since(started)

    def _begin(self, turn: int) -> None:
        if turn < self.num_layers:
            self._waits.append(self._copy(turn))

    def _copy(self, turn: int) -> Wait:
        return self._stream.copy(self._arenas[turn].memory, self._buffer(turn))

    def _buffer(self, turn: int) -> Tensor:
        """The part of it that the layer takes."""
        return self._buffers[turn % NUM_BUFFERS][: len(self._arenas[turn].memory)]

    def _pin(self) -> str:
        """Returns why not all arenas are, or nothing."""
        whys = [pin(arena.memory, arena) for arena in self._arenas]
        return next(filter(None, whys), "")


def num_bytes_of(layer: nn.Module) -> int:
    """The bytes of its arena."""
    return _places(layer)[1]


def _places(layer: nn.Module) -> tuple[list[_Place], int]:
    """Returns the place of each weight in an arena, and its bytes. Weights of one dtype that are
    adjacent in one piece of memory stay adjacent, as in stacked experts."""
    places: list[_Place] = []
    end, behind = 0, (0, torch.uint8, 0)
    for module, name, tensor in sorted(_weights(layer), key=lambda each: each[2].data_ptr()):
        piece, dtype, address = tensor.untyped_storage().data_ptr(), tensor.dtype, tensor.data_ptr()
        start = end if (piece, dtype, address) == behind else _aligned(end)
        is_parameter = isinstance(tensor, nn.Parameter)
        places.append(_Place(module, name, is_parameter, dtype, tensor.shape, start))
        end, behind = start + tensor.nbytes, (piece, dtype, address + tensor.nbytes)
    return places, _aligned(end)


def _weights(layer: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yields the parameters and buffers of all modules of ``layer``, by their names there."""
    for module in layer.modules():
        for own in (module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
            yield from ((module, name, tensor) for name, tensor in own)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
