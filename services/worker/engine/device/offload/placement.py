"""The layers with weights in host memory (``cpu-offload-gb``)."""

import logging
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from services.worker.engine.device.offload.offloaded import (
    NUM_BUFFERS,
    Arena,
    OffloadedLayers,
    num_bytes_of,
)
from services.worker.engine.device.stack_experts import stack_experts
from services.worker.layers.linear import Linear
from services.worker.layers.ops import NotSupported
from services.worker.machine.hardware import read_memory
from services.worker.weights.weight_placement import GIB, WeightPlacement
from shared.errors import ConfigError

log = logging.getLogger(__name__)

HOST = torch.device("cpu")
_Kind = tuple[tuple[int, int], ...]  # outputs and inputs of a layer's GEMMs


class HostPlacement(WeightPlacement):
    """Has all modules of a model filled in turn, and moves the weights of some ``layers`` to host
    memory as soon as they are filled.

    These are the fewest layers with ``host_bytes`` in all, or all layers, spread evenly. The first
    layers are on the host until there was one of each kind, and so the size of all is known.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        layers: Iterable[nn.Module],
        host_bytes: int,
    ) -> None:
        super().__init__(model, device)
        self._layers = list(layers)
        self._host_bytes = host_bytes
        self._kinds = [_kind(layer) for layer in self._layers]
        self._num_held = max((self._kinds.index(kind) + 1 for kind in self._kinds), default=0)
        self._sizes: dict[_Kind, int] = {}
        self._on_host = set(range(self._num_held))
        self._arenas: list[Arena] = []

    def visit(self) -> Iterator[tuple[str, nn.Module, torch.device]]:
        """Raises ConfigError if the host has less memory, nothing would be saved, or kernels cannot
        read a layer's experts."""
        indices = {module: i for i, layer in enumerate(self._layers) for module in layer.modules()}
        current: int | None = None
        for path, module in list(self._model.named_modules()):
            index = indices.get(module)
            if current is not None and index != current:
                self._settle(current)
            current = index
            yield path, module, HOST if index in self._on_host else self.device
        if current is not None:
            self._settle(current)

    def offloaded(self) -> OffloadedLayers | None:
        """After all modules are filled, and read on their devices: gives the layers on the host
        their place on the device, with room for two of them."""
        if not self._arenas:
            return None
        return OffloadedLayers(self._layers, self._arenas, self.device)

    def _settle(self, index: int) -> None:
        """The layer of ``index`` is filled."""
        self._sizes.setdefault(self._kinds[index], num_bytes_of(self._layers[index]))
        if index >= self._num_held:
            self._send(index)
        elif index == self._num_held - 1:
            self._choose()
            for held in range(self._num_held):
                self._send(held)

    def _send(self, index: int) -> None:
        """Copies a layer to its chosen memory."""
        layer = self._layers[index]
        if index in self._on_host:
            try:
                stack_experts(layer, f"model.layers.{index}")
            except NotSupported as problem:
                raise ConfigError(f"cpu-offload-gb: {self._wanted}: {problem}") from None
            self._arenas.append(Arena(layer))
        elif index < self._num_held:
            layer.to(self.device)

    def _choose(self) -> None:
        sizes = [self._sizes[kind] for kind in self._kinds]
        total = len(sizes)
        for num in range(1, total + 1):
            chosen = spread(num, total)
            num_bytes = sum(sizes[index] for index in chosen)
            if num_bytes >= self._host_bytes:
                break
        least = NUM_BUFFERS * max(sizes[index] for index in chosen)
        if num_bytes <= least:
            raise ConfigError(self._too_few(num, least))
        held = sum(sizes[index] for index in range(self._num_held) if index in chosen)
        free = read_memory(HOST).free + held
        if num_bytes > free:
            raise ConfigError(
                f"cpu-offload-gb: {self._wanted}: {num} of {total} layers take"
                f" {num_bytes / GIB:.3g} GiB of the host's memory, and"
                f" {free / GIB:.3g} GiB are free"
            )
        self._on_host = set(chosen)

    def _too_few(self, num: int, least: int) -> str:
        wanted = f"cpu-offload-gb: {self._wanted}: that is {num} of {len(self._layers)} layers"
        saves = f"{NUM_BUFFERS} of them have a place on the device in any case"
        if num == len(self._layers):
            return f"{wanted}, and {saves}: leave it at 0"
        return f"{wanted}, and {saves}: set it above {least / GIB:.3g}, or to 0"

    @property
    def _wanted(self) -> str:
        return f"{self._host_bytes / GIB:.3g}"


def spread(num: int, total: int) -> list[int]:
    """Returns ``num`` of ``total`` places, as far from each other as can be, the last among
    them."""
    return [-(-(turn + 1) * total // num) - 1 for turn in range(num)]


def _kind(layer: nn.Module) -> _Kind:
    linears = [module for module in layer.modules() if isinstance(module, Linear)]
    return tuple((linear.outputs, linear.inputs) for linear in linears)


PLACEMENT = HostPlacement
