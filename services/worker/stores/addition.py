"""A store of KV blocks as an addition to a model on a CPU."""

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from services.worker.block_layout.layout import (
    digest_of,
    facts_of,
    facts_of_groups,
    why_not_copied,
)
from services.worker.block_layout.memory import BlockMemory, StateMemory
from services.worker.machine.hardware import read_memory
from services.worker.machine.kv_cache import KVCache
from services.worker.models import CausalLM
from services.worker.models.decoder import DecoderLM
from services.worker.startup.additions import States
from services.worker.stores import folder as folders
from services.worker.stores.disk import Disk
from services.worker.stores.opening import Sizes, open_store, roots_of
from services.worker.stores.part import StorePart
from shared.settings.worker import WorkerConfig
from shared.wire.kv_groups import copy_interval
from shared.wire.messages import Capacity

log = logging.getLogger(__name__)


def check(settings: WorkerConfig, device: torch.device, *, pools: bool, is_ours: bool) -> None:
    """A store saves time alone: where none is supported, everything is computed."""
    if not is_ours:
        _warn("transformers computes this model")


def make(
    settings: WorkerConfig, folder: Path, model: DecoderLM, dtype: torch.dtype
) -> "KVStore | None":
    if why := why_not_copied(settings, model):
        _warn(why)
        return None
    return KVStore(settings, folder, model, dtype)


def _warn(why: str) -> None:
    log.warning("kv-offloading-size: no KV block is saved: %s", why)


class KVStore:
    """``part`` is made when the KV cache is there."""

    operators = None
    part: StorePart

    def __init__(
        self, settings: WorkerConfig, folder: Path, model: DecoderLM, dtype: torch.dtype
    ) -> None:
        self._settings, self._folder, self._dtype = settings, folder, dtype
        self._groups = facts_of_groups(model)
        self._roots = roots_of(settings)

    def limit(self, capacity: Capacity) -> Capacity:
        return capacity

    def num_bytes(self, num_tokens: int) -> Mapping[str, int]:
        """None of a store on a disk. A store takes the memory of those that have no owner."""
        return {
            f"KV store ({each.size_setting})": max(
                0, each.num_bytes - folders.ownerless_bytes(each.path)
            )
            for each in self._roots
            if folders.is_memory(each.path)
        }

    def begin(
        self, model: CausalLM, is_open: np.ndarray, kv_cache: KVCache, states: States
    ) -> StorePart:
        """Raises ConfigError."""
        blocks = BlockMemory(kv_cache.sections)
        copies = StateMemory(*states, num_slots=len(is_open))
        facts = facts_of(self._settings, self._folder, self._dtype, model, kv_cache)
        layout = digest_of(facts, self._groups, states[0])
        between = copy_interval(kv_cache.block_size) // kv_cache.block_size
        cache_bytes = blocks.total + copies.total
        sizes = Sizes(blocks.num_bytes, copies.num_bytes, between, cache_bytes)
        self._stores = [
            open_store(root, layout, sizes, lambda: self._free_memory) for root in self._roots
        ]
        disk = Disk(self._stores[1]) if len(self._stores) > 1 else None
        self.part = StorePart(self._stores[0], disk, blocks, copies)
        return self.part

    def close(self) -> None:
        """Gives the stores up to the next worker."""
        if self.part.disk is not None:
            self.part.disk.stop()
        for each in self._stores:
            each.close()

    @property
    def _free_memory(self) -> int:
        return read_memory(torch.device("cpu"), self._settings.numa_node).free
