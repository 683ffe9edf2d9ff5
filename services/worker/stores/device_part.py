"""The copies of a store next to a device, whose steps are launched ahead of their results.

Saved blocks are packed on the device between two steps: after the step before, and before a next
owner writes. While the plan's own step runs they are copied to the host, and a thread writes them
to their places. Loaded places are read before the step is launched, as on a CPU. ``Copied`` follows
the last write, so the result of a plan waits for it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.pieces.layout import Pieces
from services.worker.step.results import RowPart
from services.worker.step.step import PendingResult, Step
from services.worker.stores.device_copies import Buffer, DeviceCopies, Wait
from services.worker.stores.disk import LOST, UNSAVED, Disk, timed
from services.worker.stores.opening import OpenStore
from services.worker.stores.part import Row, Rows, StorePart, rows_of, warn_of_lost
from services.worker.stores.places import BlockLost
from shared.wire.codec import Array
from shared.wire.messages import Copied, Forget, Load, Save, Spill, StepPlan

NUM_READERS = 4
"""No step is launched while places are read, and checksums take half of that time."""

Written = Future[list[bytes]]  # the keys that could not be saved


class _Copying(NamedTuple):
    """The copies of a plan."""

    step: int
    lost: list[bytes]
    written: list[Written]
    load_times: list[float]


class DevicePart(StorePart):
    """Blocks and states lie in ``blocks`` and ``states``: the states of ``num_slots``, then their
    copies. None for a model without states."""

    def __init__(
        self,
        store: OpenStore,
        disk: Disk | None,
        copies: DeviceCopies,
        blocks: Pieces,
        states: Pieces | None,
        num_slots: int,
    ) -> None:
        super().__init__(store, disk)
        self._copies, self._blocks, self._states = copies, blocks, states
        self._num_slots = num_slots
        self._thread = ThreadPoolExecutor(1, "store", partial(_use, blocks.memory.device))
        self._readers = ThreadPoolExecutor(NUM_READERS, "store reads")
        self._writing: deque[tuple[Written, set[int]]] = deque()  # and the places
        self._awaiting: set[int | None] = set()  # slots without their state
        self._copying: _Copying | None = None  # of the plan that is launched
        for pieces in (blocks, states):
            if pieces is not None:
                self._compile(pieces)

    def apply(self, plan: StepPlan, pixels: Sequence[Array]) -> None:
        """Raises ValueError for a step with a state that was not loaded."""
        if self._states is not None:
            self._note_slots(plan)
        if rows := rows_of(plan):
            self._copying = self._launch(plan.step, rows)

    def after_sampling(self, step: Step) -> _Copying | None:
        copying, self._copying = self._copying, None
        return copying

    def rows_of(self, result: PendingResult, note: _Copying) -> list[RowPart]:
        """Waits for the copies, on the thread of the results."""
        unsaved = [key for each in note.written for key in each.result()]
        self.on_copied(Copied(note.step, note.lost, unsaved, self._is_down, sum(note.load_times)))
        return []

    def reset(self) -> None:
        self._awaiting.clear()

    def close(self) -> None:
        self._thread.shutdown()
        self._readers.shutdown()
        super().close()

    # --- on the thread of the steps -------------------------------------------------------------

    def _launch(self, step: int, rows: Rows) -> _Copying:
        copying = _Copying(step, [], [], [])
        while self._writing and self._writing[0][0].done():
            self._writing.popleft()
        if any(isinstance(row, Save) for row in rows) and self.own.is_removed:
            self._go_down("its files were removed")
        if spills := [row for row in rows if isinstance(row, Spill)]:
            copying.written.append(self._thread.submit(self._spill_all, step, spills))
        for (kind, pieces), group in groupby(rows, self._kind_of):
            if pieces is None:
                if kind is Forget:
                    forgets: list[Any] = [*group]
                    copying.written.append(self._write(forgets, partial(self._forget_all, forgets)))
                continue
            for part in _parts(group, self._copies.most(pieces)):
                if kind is Save:
                    copying.written.append(self._save_all(part, pieces))
                else:
                    self._load_all(part, pieces, copying)
        warn_of_lost(copying.lost)
        return copying

    def _kind_of(self, row: Row) -> tuple[type, Pieces | None]:
        match row:
            case Save():
                is_state = self.own.find(row.place).is_state
            case Load():
                is_state = row.slot is not None
            case _:
                return type(row), None
        return type(row), self._states if is_state else self._blocks

    def _save_all(self, saves: Sequence[Save], pieces: Pieces) -> Written:
        buffer = self._copies.take()
        wait = self._copies.fetch(pieces, self._rows(saves, pieces), buffer)
        return self._write(saves, partial(self._save_each, saves, pieces, buffer, wait))

    def _load_all(self, loads: Sequence[Load], pieces: Pieces, copying: _Copying) -> None:
        buffer = self._copies.take()
        for row in loads:
            self._wait_for(row)
        contents = buffer.rows(pieces, len(loads))
        with timed("load") as took:
            are_there = [*self._readers.map(self._fill, loads, contents)]
        targets = [self._rows(loads, pieces)]
        if pieces is self._states:
            targets.append([row.slot for row in loads if row.slot is not None])
        self._copies.put(pieces, *targets, buffer=buffer)
        self._copies.give_back(buffer)
        pairs = [*zip(loads, are_there, strict=True)]
        self._awaiting.difference_update(row.slot for row, is_there in pairs if is_there)
        copying.lost.extend(row.key for row, is_there in pairs if not is_there)
        copying.load_times.append(took.s)

    def _rows(self, rows: Sequence[Save] | Sequence[Load], pieces: Pieces) -> list[int]:
        first = self._num_slots if pieces is self._states else 0
        return [first + row.block for row in rows]

    def _write(
        self, rows: Sequence[Save] | Sequence[Forget], write: Callable[[], list[bytes]]
    ) -> Written:
        written: Written = self._thread.submit(write)
        self._writing.append((written, {row.place for row in rows}))
        return written

    def _wait_for(self, row: Load) -> None:
        """For writes to its place of the own store."""
        if row.store == self.own.header.id and not row.is_fetched:
            for written, places in self._writing:
                if row.place in places:
                    written.result()

    def _note_slots(self, plan: StepPlan) -> None:
        self._awaiting.difference_update(plan.release)
        for row in plan.admit:
            awaits = row.from_state is not None and row.from_state == row.to_state
            (self._awaiting.add if awaits else self._awaiting.discard)(row.slot)
        planned = {row.slot for row in plan.prefill} | {row.slot for row in plan.decode}
        if lacking := planned & self._awaiting:
            raise ValueError(f"the state of slot {min(lacking)} was not loaded")

    def _compile(self, pieces: Pieces) -> None:
        """Copies a row to the host and back: else the first copies would wait for a compiler."""
        buffer = self._copies.take()
        self._copies.fetch(pieces, [0], buffer)()
        self._copies.put(pieces, [0], buffer=buffer)
        self._copies.give_back(buffer)

    # --- on threads of the store ----------------------------------------------------------------

    def _fill(self, row: Load, content: memoryview) -> bool:
        """Reads a place, or clears a block or state that is lost, since it may have any bytes."""
        try:
            self._read(row, [content])
        except BlockLost as why:
            LOST.labels(str(why)).inc()
            np.frombuffer(content, np.uint8)[:] = 0
            return False
        return True

    def _save_each(
        self, saves: Sequence[Save], pieces: Pieces, buffer: Buffer, wait: Wait
    ) -> list[bytes]:
        wait()
        unsaved = []
        for row, content in zip(saves, buffer.rows(pieces, len(saves)), strict=True):
            with timed("save"):
                if not self._save(row, [content]):
                    unsaved.append(row.key)
                    UNSAVED.inc()
        self._copies.give_back(buffer)
        return unsaved

    def _forget_all(self, rows: Sequence[Forget]) -> list[bytes]:
        for row in rows:
            if not row.is_on_disk:
                self._forget(row)
        return []

    def _spill_all(self, step: int, spills: Sequence[Spill]) -> list[bytes]:
        self.on_spilled(step, [self._spill(row) for row in spills])
        return []


def _parts(group: Iterable[Row], most: int) -> Iterator[list[Any]]:
    rows = [*group]
    for start in range(0, len(rows), most):
        yield rows[start : start + most]


def _use(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # per thread
