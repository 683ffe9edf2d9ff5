"""A store of KV blocks as an addition to a model on a CPU."""

import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
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
from services.worker.stores.files import OtherStores, StoreFiles
from services.worker.stores.folder import FORMAT, Header, Part, read_header
from services.worker.stores.part import StorePart
from services.worker.stores.places import RECORD_BYTES, OwnPlaces
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig
from shared.wire.kv_groups import copy_interval
from shared.wire.messages import MAX_PLACES, Capacity

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
        self._root = settings.kv_offloading_dir or Path(f"/dev/shm/shoal-{os.getuid()}")
        self._size = int(settings.kv_offloading_size * (1 << 30))

    def limit(self, capacity: Capacity) -> Capacity:
        return capacity

    def num_bytes(self, num_tokens: int) -> Mapping[str, int]:
        """None of a store on a disk. A store takes the memory of those that have no owner."""
        if not folders.is_memory(self._root):
            return {}
        there = folders.ownerless_bytes(self._root)
        return {"KV store (kv-offloading-size)": max(0, self._size - there)}

    def begin(
        self, model: CausalLM, is_open: np.ndarray, kv_cache: KVCache, states: States
    ) -> StorePart:
        """Raises ConfigError."""
        blocks = BlockMemory(kv_cache.sections)
        copies = StateMemory(*states, num_slots=len(is_open))
        num_places, num_states = self._sizes(blocks, copies, kv_cache.block_size)
        facts = facts_of(self._settings, self._folder, self._dtype, model, kv_cache)
        layout = digest_of(facts, self._groups, states[0])
        folders.make_private(self._root, forbidden=0o022)
        location = self._root / layout
        folders.make_private(location)
        folder, lock = folders.claim(location)
        old = read_header(folder)
        is_known = old is not None and (old.format, old.layout) == (FORMAT, layout)
        name = old.id if old is not None and is_known else secrets.token_hex(8)
        sizes = num_places, blocks.num_bytes, num_states, copies.num_bytes
        header = Header(FORMAT, layout, name, *sizes)
        try:
            self._make_room(folder, header.parts, blocks.total + copies.total)
            own = StoreFiles(header, partial(OwnPlaces, folder))
            folders.write_header(folder, header)
            others = OtherStores(location, header)
            self.part = StorePart(own, others, blocks, copies, folders.read_location(location))
        except OSError as error:
            raise ConfigError(
                f"kv-offloading-dir: {folder}: {self._size} bytes (kv-offloading-size):"
                f" {error.strerror}"
            ) from None
        self._lock = lock  # until the process ends
        log.info(
            "KV store: %s: %d blocks of %d tokens and %d states, %d of them full",
            *(folder, num_places, kv_cache.block_size, num_states),
            sum(len(each.keys) for each in own.parts),
        )
        return self.part

    def close(self) -> None:
        """Gives the store up to the next worker."""
        self.part.own.close()
        os.close(self._lock)

    def _sizes(self, blocks: BlockMemory, copies: StateMemory, block_size: int) -> tuple[int, int]:
        """Counts the places for blocks and for states. Raises ConfigError."""
        of_block = blocks.num_bytes + RECORD_BYTES
        of_state = copies.num_bytes and copies.num_bytes + RECORD_BYTES
        between = copy_interval(block_size) // block_size
        num_places, num_states = split(self._size, of_block, of_state, between)
        if not num_places or (of_state and not num_states):
            block = f"a block of {blocks.num_bytes} and its record of {RECORD_BYTES}"
            both = f"{between} blocks and a state of {copies.num_bytes}"
            wanted = both if of_state else block
            raise ConfigError(f"kv-offloading-size: {self._size} bytes are less than {wanted}")
        if num_places > MAX_PLACES:
            log.warning("kv-offloading-size: only %d blocks of it are used", MAX_PLACES)
            num_places = MAX_PLACES
        return num_places, min(num_states, num_places)

    def _make_room(self, folder: Path, parts: Sequence[Part], cache_bytes: int) -> None:
        """Raises ConfigError, and OSError."""
        whole = sum(each.num_places * (each.place_bytes + RECORD_BYTES) for each in parts)
        lacking = whole - folders.taken_bytes(folder)
        wanted = lacking + cache_bytes if folders.is_memory(folder) else 0
        too_few = max(lacking - _free_space(folder), wanted - self._free_memory)
        for removed in folders.remove_ownerless(self._root, too_few):
            log.info("KV store: removed %s, which had no owner", removed)
        size = self._settings.kv_offloading_size
        if lacking > (free := _free_space(folder)):
            raise ConfigError(
                f"kv-offloading-size: {size:g} GiB need {lacking} bytes more in {self._root},"
                f" where {free} are free; lower it, or name another kv-offloading-dir"
            )
        if wanted > (free := self._free_memory):
            raise ConfigError(
                f"kv-offloading-size: {size:g} GiB need {lacking} bytes of memory more, and the KV"
                f" cache {cache_bytes}; {free} are free: lower it, or num-gpu-blocks-override or"
                " kv-cache-memory-bytes"
            )

    @property
    def _free_memory(self) -> int:
        return read_memory(torch.device("cpu"), self._settings.numa_node).free


def _free_space(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def split(
    num_bytes: int, block_bytes: int, state_bytes: int, blocks_between: int
) -> tuple[int, int]:
    """Counts the places for blocks and for states of a store with ``num_bytes``. States get at most
    half, as in the cache, and one place for the ``blocks_between`` two of a sequence."""
    if not state_bytes:
        return num_bytes // block_bytes, 0
    of_each = num_bytes // (blocks_between * block_bytes + state_bytes)
    num_states = min(num_bytes // 2 // state_bytes, of_each)
    return (num_bytes - num_states * state_bytes) // block_bytes, num_states
