"""The copies of a store, on the thread of the steps."""

import logging
from collections.abc import Callable, Sequence

from services.worker.block_layout.memory import BlockMemory, StateMemory
from services.worker.startup.additions import PlanPart
from services.worker.stores.disk import BYTES, LOST, UNSAVED, UP, Disk, Spilling, timed
from services.worker.stores.opening import OpenStore
from services.worker.stores.places import BlockLost, Pieces
from shared.wire.codec import Array
from shared.wire.messages import Copied, Fetch, Forget, Load, Save, Spill, StepPlan, Unfetch

log = logging.getLogger(__name__)

Row = Forget | Save | Load | Spill | Fetch | Unfetch
Rows = Sequence[Row]


class StorePart(PlanPart):
    """Copies blocks and states as plans say. ``on_copied`` gets the outcome of each plan with such
    rows, ``on_spilled`` the step and the places to write to the ``disk``. Faults of the store end
    no step."""

    def __init__(self, store: OpenStore, disk: Disk | None) -> None:
        self.own, self.location, self.disk = store.own, store.location, disk
        self._others = store.others
        self.on_copied: Callable[[Copied], None] = lambda copied: None
        self.on_spilled: Callable[[int, list[Spilling]], None] = lambda step, copies: None
        self._up = UP.labels(self.own.header.id)
        self._up.set(1)
        self._is_down = False

    def close(self) -> None:
        """Waits for copies under way."""
        if self.disk is not None:
            self.disk.stop()

    def _forget(self, row: Forget) -> None:
        found = self.own.find(row.place)
        try:
            found.places.forget(found.number)
        except OSError as error:
            self._go_down(str(error.strerror))

    def _save(self, row: Save, pieces: Pieces) -> bool:
        if self._is_down:
            return False
        found = self.own.find(row.place)
        try:
            found.places.save(found.number, row.key, pieces)
        except OSError as error:
            self._go_down(str(error.strerror))
            return False
        BYTES.labels("save").inc(found.places.part.place_bytes)
        return True

    def _spill(self, row: Spill) -> Spilling:
        """Copies a place that a later row may overwrite."""
        found = self.own.find(row.place)
        content = bytearray(found.places.part.place_bytes)
        try:
            crc = found.places.read(found.number, row.key, [memoryview(content)])
        except BlockLost as lost:
            LOST.labels(str(lost)).inc()
            return Spilling(row.key, row.place_on_disk, None, 0)
        return Spilling(row.key, row.place_on_disk, content, crc)

    def _read(self, row: Load, pieces: Pieces) -> None:
        """Raises BlockLost."""
        if row.is_fetched:
            self._take(row, pieces)
        else:
            self._read_place(row, pieces)
        BYTES.labels("load").inc(sum(map(len, pieces)))

    def _read_place(self, row: Load, pieces: Pieces) -> None:
        own = self.own.header.id == row.store
        store = self.own if own else self._others.find(row.store)
        if store is None:
            raise BlockLost("unreadable")
        found = store.find(row.place)
        if found.is_state != (row.slot is not None):
            raise BlockLost("other")
        found.places.load(found.number, row.key, pieces)

    def _take(self, row: Load, pieces: Pieces) -> None:
        content = self.disk.take(row.key) if self.disk is not None else None
        if content is None or len(content) != sum(map(len, pieces)):
            raise BlockLost("other")
        left = memoryview(content)  # slices of it are no copies
        for piece in pieces:
            piece[:], left = left[: len(piece)], left[len(piece) :]

    def _go_down(self, why: str) -> None:
        if not self._is_down:
            log.warning("KV store: takes no more blocks: %s; sequences go on", why)
            self._is_down = True
            self._up.set(0)


def warn_of_lost(lost: Sequence[bytes]) -> None:
    if lost:
        log.warning("KV store: %d blocks or states are lost, and computed again", len(lost))


class HostPart(StorePart):
    """Copies on the thread of the steps, between two steps."""

    def __init__(
        self, store: OpenStore, disk: Disk | None, blocks: BlockMemory, states: StateMemory
    ) -> None:
        super().__init__(store, disk)
        self._blocks, self._states = blocks, states

    def apply(self, plan: StepPlan, pixels: Sequence[Array]) -> None:
        if rows := rows_of(plan):
            self.on_copied(self._copy(plan.step, rows))

    def _copy(self, step: int, rows: Rows) -> Copied:
        lost, unsaved, load_s = [], [], 0.0
        if any(isinstance(row, Save) for row in rows) and self.own.is_removed:
            self._go_down("its files were removed")
        if spilled := [self._spill(row) for row in rows if isinstance(row, Spill)]:
            self.on_spilled(step, spilled)
        for row in rows:
            match row:
                case Forget(is_on_disk=False):
                    self._forget(row)
                case Save():
                    with timed("save"):
                        if not self._save(row, self._pieces_of(row)):
                            unsaved.append(row.key)
                            UNSAVED.inc()
                case Load():
                    with timed("load") as took:
                        if not self._load(row):
                            lost.append(row.key)
                    load_s += took.s
        warn_of_lost(lost)
        return Copied(step, lost, unsaved, self._is_down, load_s)

    def _pieces_of(self, row: Save) -> Pieces:
        is_state = self.own.find(row.place).is_state
        return (self._states if is_state else self._blocks).pieces(row.block)

    def _load(self, row: Load) -> bool:
        """A block or a state that is lost is cleared, since it may have any bytes."""
        memory = self._blocks if row.slot is None else self._states
        is_lost = False
        try:
            self._read(row, memory.pieces(row.block))
        except BlockLost as lost:
            LOST.labels(str(lost)).inc()
            memory.clear(row.block)
            is_lost = True
        if row.slot is not None:
            self._states.begin(row.slot, row.block, is_lost=is_lost)
        return not is_lost


def is_answered(rows: Rows) -> bool:
    """False for rows that copy nothing."""
    return any(isinstance(row, Save | Load) for row in rows)


def rows_of(plan: StepPlan) -> Rows:
    return [row for row in plan.rows if isinstance(row, Row)]
