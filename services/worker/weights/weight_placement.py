"""Where a model's weights are: on its device, unless some are in host memory."""

from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import cast

import torch
from torch import nn

from services.worker.layers.offloaded import Offloaded
from shared.errors import ConfigError

GIB = 1 << 30
# The module with a ``PLACEMENT`` for ``cpu-offload-gb``.
PLACEMENTS: list[str] = [
    "services.worker.engine.device.offload.placement",
]


class WeightPlacement:
    """Has all modules of a model filled in turn."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self._model = model

    def visit(self) -> Iterator[tuple[str, nn.Module, torch.device]]:
        """Yields each module with its path, to be filled before the next, and the device for its
        weights. Raises ConfigError."""
        for path, module in list(self._model.named_modules()):
            yield path, module, self.device

    def offloaded(self) -> Offloaded | None:
        """Called once all modules are filled. Returns the layers in host memory; None: all are on
        the device."""
        return None


def make_placement(
    model: nn.Module, device: torch.device, layers: Iterable[nn.Module], host_bytes: int
) -> WeightPlacement:
    """Some ``layers`` with ``host_bytes`` in all are on the host. Raises ConfigError if that is not
    a part of this installation."""
    if not host_bytes:
        return WeightPlacement(model, device)
    if not PLACEMENTS:
        raise ConfigError("cpu-offload-gb: layers in host memory are not installed; set it to 0")
    make = import_module(PLACEMENTS[0]).PLACEMENT
    return cast(WeightPlacement, make(model, device, layers, host_bytes))
