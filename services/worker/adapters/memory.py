"""The memory of adapters, planned before they are loaded."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from services.worker.adapters.folder import AdapterFolder, Measured
from services.worker.adapters.places import folders_of
from services.worker.adapters.sites import Layers, Site, packed_bytes
from services.worker.layers.experts import Router
from services.worker.layers.linear import Linear
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig

FILE_COPIES = 3  # of a tensor that is read: its bytes, its numbers and their multiples


class AdapterMemory:
    """``room`` for packed adapters: ``max-cpu-loras`` of ``max-lora-rank`` that change the common
    sites, and the larger size of adapters in the settings. ``loading``: for reading one of them."""

    def __init__(
        self, settings: WorkerConfig, sites: Sequence[Site], layers: Layers, dtype: torch.dtype
    ) -> None:
        self._sites, self._itemsize = sites, dtype.itemsize
        num, rank = settings.num_adapters, settings.max_lora_rank
        common = [site for site in sites if site.is_common]
        names = {name: rank for site in common for name in site.parts}
        each = packed_bytes(common, names, dtype.itemsize)
        totals = [
            part.inputs.total + part.outputs.total
            for site in common
            for part in site.parts.values()
        ]
        self.common = num * each
        self.loading = sum(totals) * rank * (torch.float32.itemsize + dtype.itemsize)
        self.larger = 0
        found = _measured(settings, layers, dtype)
        for measured, _ in zip(found, range(num), strict=False):
            self.larger += max(0, self.packed(measured.ranks) - each)
            self.loading = max(self.loading, loading_bytes(measured))

    @property
    def room(self) -> int:
        return self.common + self.larger

    def packed(self, ranks: Mapping[str, int]) -> int:
        """The bytes of an adapter with some ``ranks`` of layers."""
        return packed_bytes(self._sites, ranks, self._itemsize)

    def needed(self, measured: Measured) -> int:
        """The bytes that an adapter takes of ``room``, also while it is read."""
        more = loading_bytes(measured) - self.loading
        return self.packed(measured.ranks) + max(0, more)


def loading_bytes(measured: Measured) -> int:
    return measured.num_bytes + FILE_COPIES * measured.largest


def _measured(settings: WorkerConfig, layers: Layers, dtype: torch.dtype) -> Iterator[Measured]:
    """The adapters of the settings, in the order of loading. A bad one is refused when it is
    loaded."""
    for name, folder in folders_of(settings):
        try:
            adapter = AdapterFolder(name, folder(), layers, settings.max_lora_rank)
        except (ConfigError, OSError):
            continue
        yield adapter.measure(dtype)


def widest(sites: Sequence[Site], rank: int) -> int:
    """The numbers of a token in a step: inputs, deltas and A x of a site, of experts for each that
    the token takes."""
    most, num_chosen = 0, 1
    for module, parts, is_common in sites:
        if isinstance(module, Router):
            num_chosen = module.routing.num_chosen
        elif isinstance(module, Linear):
            own = module.inputs + module.outputs + len(parts) * rank
            most = max(most, own if is_common else own * num_chosen)
    return most
