"""A store of KV blocks as an addition to a model."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from kernels.delta import LayerStates
from kernels.pieces.layout import pieces_of
from services.worker.block_layout.layout import (
    digest_of,
    facts_of,
    facts_of_groups,
    is_on_gpu,
    parts_of,
    why_not_copied,
)
from services.worker.block_layout.memory import BlockMemory, StateMemory
from services.worker.machine.hardware import read_memory
from services.worker.machine.kv_cache import KVCache
from services.worker.models import CausalLM
from services.worker.models.decoder import DecoderLM
from services.worker.startup.additions import States
from services.worker.startup.cache_codes import CACHE_CODES, choose_cache_dtype
from services.worker.startup.model_shape import shape_of
from services.worker.stores import folder as folders
from services.worker.stores.device_copies import NUM_BUFFERS, DeviceCopies, buffer_bytes
from services.worker.stores.device_part import DevicePart
from services.worker.stores.disk import Disk
from services.worker.stores.opening import OpenStore, Sizes, open_store, roots_of
from services.worker.stores.part import HostPart, StorePart
from services.worker.stores.ranks import RankPart, facts_of_rank, open_in_turn
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
    if why := _why_not_saved(settings, model):
        _warn(why)
        return None
    return KVStore(settings, folder, model, dtype)


def _why_not_saved(settings: WorkerConfig, model: DecoderLM) -> str:
    if settings.tensor_parallel_size == 1 or model.lm_head is None:
        return why_not_copied(settings, model)
    for setting, is_on in (
        ("nnodes above 1", settings.nnodes > 1),
        ("kv-disk-size", settings.kv_disk_size),
        ("GPUs", is_on_gpu(model)),
    ):
        if is_on:
            return f"several ranks have none with {setting}"
    return ""


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
        self._parallel = model.parallel
        self._gpu_bytes = _gpu_bytes(settings, model, dtype) if is_on_gpu(model) else 0

    def limit(self, capacity: Capacity) -> Capacity:
        return capacity

    def num_bytes(self, num_tokens: int) -> Mapping[str, int]:
        """None of a store on a disk. A store takes the memory of those that have no owner. On a GPU
        only copies take any."""
        if self._gpu_bytes:
            return {"copies for a KV store (kv-offloading-size)": self._gpu_bytes}
        return {
            f"KV store ({each.size_setting})": max(
                0, each.num_bytes - folders.ownerless_bytes(each.path) // self._parallel.size
            )
            for each in self._roots
            if folders.is_memory(each.path)
        }

    def begin(
        self, model: CausalLM, is_open: np.ndarray, kv_cache: KVCache, states: States
    ) -> StorePart:
        """Raises ConfigError."""
        facts = facts_of(self._settings, self._folder, self._dtype, model, kv_cache)
        if self._parallel.size > 1:
            facts |= facts_of_rank(self._parallel)
        layout = digest_of(facts, self._groups, states[0])
        between = copy_interval(kv_cache.block_size) // kv_cache.block_size
        if len(states[1]):
            self.part = self._begin_on_host(layout, between, len(is_open), kv_cache, states)
        else:
            self.part = self._begin_on_device(layout, between, len(is_open), kv_cache, states[0])
        return self.part

    def close(self) -> None:
        """Gives the stores up to the next worker."""
        self.part.close()
        for each in self._stores:
            each.close()

    def _begin_on_host(
        self, layout: str, between: int, num_slots: int, kv_cache: KVCache, states: States
    ) -> HostPart:
        blocks, copies = BlockMemory(kv_cache.sections), StateMemory(*states, num_slots)
        cache_bytes = blocks.total + copies.total
        sizes = Sizes(blocks.num_bytes, copies.num_bytes, between, cache_bytes)
        store, disk = self._open(layout, sizes)
        if self._parallel.size > 1:
            return RankPart(store, blocks, copies, self._parallel)
        return HostPart(store, disk, blocks, copies)

    def _begin_on_device(
        self,
        layout: str,
        between: int,
        num_slots: int,
        kv_cache: KVCache,
        states: Sequence[LayerStates],
    ) -> DevicePart:
        blocks = pieces_of([each for each in kv_cache.sections if each.numel()])
        parts = [each for layer in states for each in parts_of(layer) if each.numel()]
        copied = pieces_of(parts) if parts else None
        state_bytes = copied.row_bytes if copied is not None else 0
        copies = DeviceCopies(kv_cache.device, max(blocks.row_bytes, state_bytes))
        sizes = Sizes(blocks.row_bytes, state_bytes, between, cache_bytes=0)
        return DevicePart(*self._open(layout, sizes), copies, blocks, copied, num_slots)

    def _open(self, layout: str, sizes: Sizes) -> tuple[OpenStore, Disk | None]:
        self._stores = [
            open_in_turn(
                self._parallel, partial(open_store, root, layout, sizes, lambda: self._free_memory)
            )
            for root in self._roots
        ]
        return self._stores[0], Disk(self._stores[1]) if len(self._stores) > 1 else None

    @property
    def _free_memory(self) -> int:
        return read_memory(torch.device("cpu"), self._settings.numa_node).free


def _gpu_bytes(settings: WorkerConfig, model: DecoderLM, dtype: torch.dtype) -> int:
    """The memory for copies."""
    codes = CACHE_CODES[choose_cache_dtype(settings.kv_cache_dtype, model.config)]
    shape = shape_of(model, dtype, drafts=model.mtp_head is not None, codes=codes)
    state_bytes = sum(each.num_bytes for each in shape.state_specs)
    return NUM_BUFFERS * buffer_bytes(max(settings.block_size * shape.token_bytes, state_bytes))
