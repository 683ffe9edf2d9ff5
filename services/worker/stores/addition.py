"""A store of KV blocks as an addition to a model on a CPU."""

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from prometheus_client import Counter, Gauge

from services.worker.block_layout import BlockMemory, digest_of, facts_of, why_not_copied
from services.worker.machine.hardware import read_memory
from services.worker.machine.kv_cache import KVCache
from services.worker.models import CausalLM
from services.worker.models.decoder import DecoderLM
from services.worker.startup.additions import PlanPart
from services.worker.stores import folder as folders
from services.worker.stores.folder import FORMAT, Header, read_header
from services.worker.stores.places import RECORD_BYTES, BlockLost, OtherStores, OwnPlaces
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig
from shared.wire.codec import Array
from shared.wire.messages import (
    MAX_PLACES,
    Capacity,
    Copied,
    Forget,
    Load,
    Save,
    StepPlan,
)

log = logging.getLogger(__name__)

BYTES = Counter("shoal_kv_store_bytes", "Bytes of KV blocks saved and loaded", ["direction"])
SECONDS = Counter(
    "shoal_kv_store_seconds", "Seconds spent on saving and loading KV blocks", ["direction"]
)
LOST = Counter(
    "shoal_kv_store_lost",
    "KV blocks that could not be loaded: another or none is there (other), damaged (damaged), or"
    " not readable (unreadable)",
    ["reason"],
)
UNSAVED = Counter("shoal_kv_store_unsaved", "KV blocks that could not be saved")
UP = Gauge("shoal_kv_store_up", "1 while a worker's store takes KV blocks", ["store"])

Rows = Sequence[Forget | Save | Load]


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
    return KVStore(settings, folder, dtype)


def _warn(why: str) -> None:
    log.warning("kv-offloading-size: no KV block is saved: %s", why)


class KVStore:
    """``part`` is made when the KV cache is there."""

    operators = None
    part: "StorePart"

    def __init__(self, settings: WorkerConfig, folder: Path, dtype: torch.dtype) -> None:
        self._settings, self._folder, self._dtype = settings, folder, dtype
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

    def begin(self, model: CausalLM, is_open: np.ndarray, kv_cache: KVCache) -> "StorePart":
        """Raises ConfigError."""
        memory = BlockMemory(kv_cache)
        num_places = self._size // (memory.num_bytes + RECORD_BYTES)
        if num_places == 0:
            raise ConfigError(
                f"kv-offloading-size: {self._size} bytes are less than a block of"
                f" {memory.num_bytes} and its record of {RECORD_BYTES}"
            )
        if num_places > MAX_PLACES:
            log.warning("kv-offloading-size: only %d blocks of it are used", MAX_PLACES)
            num_places = MAX_PLACES
        facts = facts_of(self._settings, self._folder, self._dtype, model, kv_cache)
        layout = digest_of(facts)
        folders.make_private(self._root, forbidden=0o022)
        location = self._root / layout
        folders.make_private(location)
        folder, lock = folders.claim(location)
        try:
            self._make_room(folder, memory, num_places)
            old = read_header(folder)
            name = secrets.token_hex(8)
            if old is not None and (old.format, old.layout) == (FORMAT, layout):
                name = old.id
            own = OwnPlaces(folder, Header(FORMAT, layout, name, num_places, memory.num_bytes))
            others = OtherStores(location, layout, memory.num_bytes)
            self.part = StorePart(own, others, memory, folders.read_location(location))
        except OSError as error:
            raise ConfigError(
                f"kv-offloading-dir: {folder}: {self._size} bytes (kv-offloading-size):"
                f" {error.strerror}"
            ) from None
        self._lock = lock  # until the process ends
        log.info(
            "KV store: %s: %d blocks of %d tokens, %d of them full",
            *(folder, num_places, self._settings.block_size, len(own.keys)),
        )
        return self.part

    def close(self) -> None:
        """Gives the store up to the next worker."""
        self.part.own.close()
        os.close(self._lock)

    def _make_room(self, folder: Path, memory: BlockMemory, num_places: int) -> None:
        """Raises ConfigError, and OSError."""
        lacking = num_places * (memory.num_bytes + RECORD_BYTES) - folders.taken_bytes(folder)
        wanted = lacking + memory.total if folders.is_memory(folder) else 0
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
                f" cache {memory.total}; {free} are free: lower it, or num-gpu-blocks-override or"
                " kv-cache-memory-bytes"
            )

    @property
    def _free_memory(self) -> int:
        return read_memory(torch.device("cpu"), self._settings.numa_node).free


def _free_space(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


class StorePart(PlanPart):
    """Copies blocks as plans say, on the thread of the steps. ``on_copied`` gets the outcome of
    each plan with such rows. Faults of the store end no step."""

    def __init__(
        self, own: OwnPlaces, others: OtherStores, memory: BlockMemory, location: str
    ) -> None:
        self.own, self.location = own, location
        self._others, self._memory = others, memory
        self.on_copied: Callable[[Copied], None] = lambda copied: None
        self._up = UP.labels(own.header.id)
        self._up.set(1)
        self._is_down = False

    def apply(self, plan: StepPlan, pixels: Sequence[Array]) -> None:
        if rows := rows_of(plan):
            self.on_copied(self._copy(plan.step, rows))

    def inventory(self) -> tuple[np.ndarray, np.ndarray]:
        """The keys of full places and their places."""
        places = {key: place for place, key in self.own.keys.items()}  # the last of a key
        return np.frombuffer(b"".join(places), np.uint8), np.array([*places.values()], np.int32)

    def _copy(self, step: int, rows: Rows) -> Copied:
        lost, unsaved = [], []
        if any(isinstance(row, Save) for row in rows) and self.own.is_removed:
            self._go_down("its files were removed")
        for row in rows:
            started_s = time.perf_counter()
            match row:
                case Forget():
                    self._forget(row)
                case Save():
                    if not self._save(row):
                        unsaved.append(row.key)
                        UNSAVED.inc()
                    SECONDS.labels("save").inc(time.perf_counter() - started_s)
                case Load():
                    if not self._load(row):
                        lost.append(row.key)
                    SECONDS.labels("load").inc(time.perf_counter() - started_s)
        if lost:
            log.warning("KV store: %d blocks are lost, and computed again", len(lost))
        return Copied(step, lost=lost, unsaved=unsaved, is_down=self._is_down)

    def _forget(self, row: Forget) -> None:
        try:
            self.own.forget(row.place)
        except OSError as error:
            self._go_down(str(error.strerror))

    def _save(self, row: Save) -> bool:
        if self._is_down:
            return False
        try:
            self.own.save(row.place, row.key, self._memory.pieces(row.block))
        except OSError as error:
            self._go_down(str(error.strerror))
            return False
        BYTES.labels("save").inc(self._memory.num_bytes)
        return True

    def _load(self, row: Load) -> bool:
        """A block that is lost is cleared, since it may have any bytes."""
        own = self.own.header.id == row.store
        try:
            places = self.own if own else self._others.find(row.store)
            if places is None:
                raise BlockLost("unreadable")
            places.load(row.place, row.key, self._memory.pieces(row.block))
        except BlockLost as lost:
            LOST.labels(str(lost)).inc()
            self._memory.clear(row.block)
            return False
        BYTES.labels("load").inc(self._memory.num_bytes)
        return True

    def _go_down(self, why: str) -> None:
        if not self._is_down:
            log.warning("KV store: takes no more blocks: %s; sequences go on", why)
            self._is_down = True
            self._up.set(0)


def is_answered(rows: Rows) -> bool:
    """False for rows that copy nothing."""
    return any(isinstance(row, Save | Load) for row in rows)


def rows_of(plan: StepPlan) -> Rows:
    return [row for row in plan.rows if isinstance(row, Forget | Save | Load)]
