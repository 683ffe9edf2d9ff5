"""Where a model's weights are: on its device, or some layers' on the host (``cpu-offload-gb``)."""

import logging
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from services.worker.layers.experts import Experts
from services.worker.layers.offloaded import NUM_BUFFERS, Arena, OffloadedLayers, num_bytes_of
from services.worker.machine.hardware import read_memory
from shared.errors import ConfigError

log = logging.getLogger(__name__)

HOST = torch.device("cpu")
GIB = 1 << 30


class Homes:
    """Has all modules of a model filled in turn, and sends the weights of some ``layers`` to the
    host's memory as soon as they are there.

    These are as few as have ``host_bytes``, or all, spread evenly. The first layer is on the host
    until it is known how large one is.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        layers: Iterable[nn.Module] = (),
        host_bytes: int = 0,
    ) -> None:
        self.device = device
        self._model = model
        self._layers = list(layers)
        self._host_bytes = host_bytes
        self._on_host: set[int] = set()
        self._arenas: list[Arena] = []

    def visit(self) -> Iterator[tuple[str, nn.Module, torch.device]]:
        """Yields each module with its path, to be filled before the next, and where its weights are
        to be then. Raises ConfigError where the host has less memory, nothing would be saved, or
        layers have experts, whose weights become one on the device."""
        layers = self._layers if self._host_bytes else []
        if any(isinstance(module, Experts) for layer in layers for module in layer.modules()):
            raise ConfigError(
                f"cpu-offload-gb: {self._wanted}: layers with experts cannot be in the host's"
                " memory; leave it at 0"
            )
        indices = {module: i for i, layer in enumerate(layers) for module in layer.modules()}
        current: int | None = None
        for path, module in list(self._model.named_modules()):
            index = indices.get(module)
            if current is not None and index != current:
                self._settle(current)
            current = index
            yield path, module, HOST if index == 0 or index in self._on_host else self.device
        if current is not None:
            self._settle(current)

    def offloaded(self) -> OffloadedLayers | None:
        """When all is filled, and read where it was filled: gives the layers on the host their
        place on the device, which is for two of them."""
        if not self._arenas:
            return None
        return OffloadedLayers(self._layers, self._arenas, self.device)

    def _settle(self, index: int) -> None:
        """The layer of ``index`` is filled."""
        layer = self._layers[index]
        if index == 0:
            self._choose(num_bytes_of(layer))
        if index in self._on_host:
            self._arenas.append(Arena(layer))
        elif index == 0:
            layer.to(self.device)

    def _choose(self, layer_bytes: int) -> None:
        total = len(self._layers)
        num = min(-(-self._host_bytes // layer_bytes), total)
        if num <= NUM_BUFFERS:
            raise ConfigError(self._too_few(num, layer_bytes))
        free = read_memory(HOST).free
        if num * layer_bytes > free:
            raise ConfigError(
                f"cpu-offload-gb: {self._wanted}: {num} of {total} layers take"
                f" {num * layer_bytes / GIB:.3g} GiB of the host's memory, and"
                f" {free / GIB:.3g} GiB are free"
            )
        self._on_host = set(spread(num, total))

    def _too_few(self, num: int, layer_bytes: int) -> str:
        wanted = f"cpu-offload-gb: {self._wanted}: that is {num} of {len(self._layers)} layers"
        saves = f"{NUM_BUFFERS} of them have a place on the device in any case"
        if len(self._layers) <= NUM_BUFFERS:
            return f"{wanted}, and {saves}: leave it at 0"
        least = NUM_BUFFERS * layer_bytes / GIB
        return f"{wanted}, and {saves}: set it above {least:.3g}, or to 0"

    @property
    def _wanted(self) -> str:
        return f"{self._host_bytes / GIB:.3g}"


def spread(num: int, total: int) -> list[int]:
    """Returns ``num`` of ``total`` places, as far from each other as can be, the last among
    them."""
    return [-(-(turn + 1) * total // num) - 1 for turn in range(num)]
