"""The copies of a store, on the thread of the steps."""

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
from prometheus_client import Counter, Gauge

from services.worker.block_layout.memory import BlockMemory, StateMemory
from services.worker.startup.additions import PlanPart
from services.worker.stores.files import OtherStores, StoreFiles
from services.worker.stores.places import BlockLost, OwnPlaces
from shared.wire.codec import Array
from shared.wire.messages import FIRST_STATE, Copied, Forget, Load, Save, StepPlan

log = logging.getLogger(__name__)

BYTES = Counter(
    "shoal_kv_store_bytes", "Bytes of KV blocks and states saved and loaded", ["direction"]
)
SECONDS = Counter(
    "shoal_kv_store_seconds", "Seconds spent on saving and loading them", ["direction"]
)
LOST = Counter(
    "shoal_kv_store_lost",
    "KV blocks and states that could not be loaded: another or none is there (other), damaged"
    " (damaged), or not readable (unreadable)",
    ["reason"],
)
UNSAVED = Counter("shoal_kv_store_unsaved", "KV blocks and states that could not be saved")
UP = Gauge("shoal_kv_store_up", "1 while a worker's store takes KV blocks", ["store"])

Rows = Sequence[Forget | Save | Load]


class StorePart(PlanPart):
    """Copies blocks and states as plans say, on the thread of the steps. ``on_copied`` gets the
    outcome of each plan with such rows. Faults of the store end no step."""

    def __init__(
        self,
        own: StoreFiles[OwnPlaces],
        others: OtherStores,
        blocks: BlockMemory,
        states: StateMemory,
        location: str,
    ) -> None:
        self.own, self.location = own, location
        self._others, self._blocks, self._states = others, blocks, states
        self.on_copied: Callable[[Copied], None] = lambda copied: None
        self._up = UP.labels(own.header.id)
        self._up.set(1)
        self._is_down = False

    def apply(self, plan: StepPlan, pixels: Sequence[Array]) -> None:
        if rows := rows_of(plan):
            self.on_copied(self._copy(plan.step, rows))

    def inventory(self) -> tuple[np.ndarray, np.ndarray]:
        """The keys of full places and their places."""
        places: dict[bytes, int] = {}  # the last of a key
        for first, part in zip((0, FIRST_STATE), self.own.parts, strict=False):
            places |= {key: first + place for place, key in part.keys.items()}
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
            log.warning("KV store: %d blocks or states are lost, and computed again", len(lost))
        return Copied(step, lost=lost, unsaved=unsaved, is_down=self._is_down)

    def _forget(self, row: Forget) -> None:
        found = self.own.find(row.place)
        try:
            found.places.forget(found.number)
        except OSError as error:
            self._go_down(str(error.strerror))

    def _save(self, row: Save) -> bool:
        if self._is_down:
            return False
        found = self.own.find(row.place)
        memory = self._states if found.is_state else self._blocks
        try:
            found.places.save(found.number, row.key, memory.pieces(row.block))
        except OSError as error:
            self._go_down(str(error.strerror))
            return False
        BYTES.labels("save").inc(memory.num_bytes)
        return True

    def _load(self, row: Load) -> bool:
        """A block or a state that is lost is cleared, since it may have any bytes."""
        memory = self._blocks if row.slot is None else self._states
        is_lost = False
        try:
            self._read(row, memory)
            BYTES.labels("load").inc(memory.num_bytes)
        except BlockLost as lost:
            LOST.labels(str(lost)).inc()
            memory.clear(row.block)
            is_lost = True
        if row.slot is not None:
            self._states.begin(row.slot, row.block, is_lost=is_lost)
        return not is_lost

    def _read(self, row: Load, memory: BlockMemory) -> None:
        own = self.own.header.id == row.store
        store = self.own if own else self._others.find(row.store)
        if store is None:
            raise BlockLost("unreadable")
        found = store.find(row.place)
        if found.is_state != (row.slot is not None):
            raise BlockLost("other")
        found.places.load(found.number, row.key, memory.pieces(row.block))

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
