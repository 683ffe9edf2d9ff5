"""Drafts on a device: the MTP head makes them after each step, or the host looks them up with the
result."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from services.worker.engine.device.computation import DeviceComputation
from services.worker.engine.device.device_slots import DeviceSlots
from services.worker.machine.streams import Fetched
from services.worker.slots.table import SlotTable
from services.worker.speculation.mtp import MtpCoverage
from services.worker.speculation.ngram import NgramDrafter
from services.worker.step.results import RowPart
from services.worker.step.step import PendingResult, Step, StepPart
from shared.wire.messages import Capacity, StepPlan


class Drafts(StepPart[Any]):  # none; other kinds derive from it
    is_of_every_step = True
    recomputes_states = False

    def begin(self, plan: StepPlan, fresh_blocks: np.ndarray) -> None:
        """``plan`` is applied to the table; ``fresh_blocks`` [N] int64 have new owners."""

    def draft(self, step: Step, result: PendingResult) -> None:
        """Called after sampling and acceptance."""


class _Made(NamedTuple):
    """The drafts of ``slots`` [n], not fetched if the host has no logits rules for these slots."""

    slots: np.ndarray
    fetched: Fetched | None


class MtpDrafts(Drafts):
    recomputes_states = True

    def __init__(self, table: SlotTable, slots: DeviceSlots, capacity: Capacity) -> None:
        self._table = table
        self._slots = slots
        self._coverage = MtpCoverage(capacity)

    def begin(self, plan: StepPlan, fresh_blocks: np.ndarray) -> None:
        coverage = self._coverage
        coverage.begin(self._table, plan, fresh_blocks)
        if plan.admit:
            slots = np.array([row.slot for row in plan.admit])
            self._slots.set_pairs(slots, coverage.starts[slots], coverage.ends[slots])

    def before_forward(self, step: Step) -> None:
        """Notes the pairs of chunks, for sequences that reuse them from the prefix cache."""
        if not step.depth or not step.rows.has_chunks:
            return
        chunks = step.rows.chunks
        known = self._table.num_tokens[chunks.slots]
        known[chunks.sampling_rows] += 1
        self._coverage.note(self._table, chunks.slots, chunks.starts + 1, chunks.ends, known)

    def draft(self, step: Step, result: PendingResult) -> None:
        computation, slots = step.computation, step.rows.sampling_slots
        assert isinstance(computation, DeviceComputation)
        computation.step.draft(step.depth)
        has_rules = self._slots.has_host_rules[slots].any()
        fetched = self._slots.fetch_drafts(slots) if has_rules else None
        result.notes.append((self, _Made(slots, fetched)))

    def rows_of(self, result: PendingResult, note: _Made) -> list[RowPart]:
        """Notes the pairs of decode rows, and the drafts."""
        table, rows = self._table, result.rows.decoding
        first, last = rows.starts + 1, rows.ends
        self._coverage.note(table, rows.slots, first, last, table.num_tokens[rows.slots])
        if note.fetched is not None:
            _note(table, note.slots, *note.fetched.wait())
        return []


class NgramDrafts(Drafts):
    """A step with drafts first waits for the results of all earlier steps."""

    def __init__(
        self,
        table: SlotTable,
        slots: DeviceSlots,
        drafter: NgramDrafter,
        catch_up: Callable[[], None],
    ) -> None:
        self._table = table
        self._slots = slots
        self._drafter = drafter
        self._catch_up = catch_up

    def before_forward(self, step: Step) -> None:
        rows = step.rows.decoding
        if rows.num_drafts.any():
            self._catch_up()
            self._slots.set_drafts(self._table, rows.slots)

    def draft(self, step: Step, result: PendingResult) -> None:
        result.notes.append((self, None))

    def rows_of(self, result: PendingResult, note: None) -> list[RowPart]:
        """Looks up the next drafts."""
        outcome, slots = result.outcome, result.rows.sampling_slots
        goes_on = ~outcome.has_ended & (outcome.num_emitted > 0)
        self._drafter.look_up(self._table, slots[goes_on], result.depth)
        return []


def _note(table: SlotTable, slots: np.ndarray, drafts: np.ndarray, nums: np.ndarray) -> None:
    """Puts the first ``nums`` [R] of ``drafts`` [R, max drafts] of ``slots`` [R] into the table."""
    for slot, row, num in zip(slots.tolist(), drafts, nums.tolist(), strict=True):
        if table.is_open[slot]:
            start = table.num_tokens[slot]
            table.ids[slot, start : start + num] = row[:num]
            table.num_drafts[slot] = num
