"""The memory of adapters, planned before they are loaded."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import torch

from services.worker.adapters.folder import AdapterFolder, Measured
from services.worker.adapters.places import folders_of
from services.worker.adapters.sites import Layers, Site, packed_bytes
from services.worker.layers.experts import Router
from services.worker.layers.linear import Linear
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig


class AdapterMemory:
    """``planned``: for ``max-cpu-loras`` of ``max-lora-rank`` that change the common sites;
    ``larger``: more for adapters of the settings that take more, and ``loading``: for reading
    one."""

    def __init__(
        self, settings: WorkerConfig, sites: Sequence[Site], layers: Layers, dtype: torch.dtype
    ) -> None:
        self._sites, self._itemsize = sites, dtype.itemsize
        num, rank = settings.num_adapters, settings.max_lora_rank
        common = [site for site in sites if site.is_common]
        ranks = {name: rank for site in common for name in site.parts}
        each = self.size(ranks)
        self.planned = num * packed_bytes(common, ranks, dtype.itemsize)
        self.loading = each // dtype.itemsize * (torch.float32.itemsize + dtype.itemsize)
        found = [*islice(_measured(settings, layers, dtype), num)]
        self.larger = sum(max(0, self.size(measured.ranks) - each) for measured in found)
        self.loading = max([self.loading, *map(loading_bytes, found)])
        self._room = num * each + self.larger

    @property
    def room(self) -> int:
        """The sum of ``size`` of all adapters."""
        return self._room

    def size(self, ranks: Mapping[str, int]) -> int:
        """The bytes of an adapter with some ``ranks`` of layers: of its numbers, and at rare sites
        of these as they are packed."""
        numbers = sum(
            ranks[name] * (part.inputs.total + part.outputs.total)
            for site in self._sites
            for name, part in site.parts.items()
            if site.is_common and name in ranks
        )
        rare = [site for site in self._sites if not site.is_common]
        return numbers * self._itemsize + packed_bytes(rare, ranks, self._itemsize)

    def needed(self, measured: Measured) -> int:
        """The bytes that an adapter takes of ``room``, also while it is read."""
        return self.size(measured.ranks) + max(0, loading_bytes(measured) - self.loading)


def loading_bytes(measured: Measured) -> int:
    return measured.num_bytes + measured.largest


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
