"""A plan's rows as the device takes them: rows whose lengths it alone knows, and prompt chunks.

A slot is the host's until the ids that it was admitted with are computed. From then on the host
knows bounds.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from services.worker.slots.table import SlotTable
from shared.wire.messages import Capacity, StepPlan


@dataclass(frozen=True)
class PlannedRows:
    """B rows that decode, and C chunks, P of which end with the last id that is known."""

    decode_slots: np.ndarray  # [B] int64
    depths: np.ndarray  # [B] int64: drafts to verify, at most
    chunk_slots: np.ndarray  # [C] int64
    chunk_nums: np.ndarray  # [C] int64: tokens of each
    chunk_starts: np.ndarray  # [C] int64: the position of the first
    num_recomputed: np.ndarray  # [C] int64: of them, at the start: for their states alone
    sampling_chunks: np.ndarray  # [P] int64, indices into C

    def without_chunks(self) -> "PlannedRows":
        none = self.chunk_slots[:0]
        return PlannedRows(
            decode_slots=self.decode_slots,
            depths=self.depths,
            chunk_slots=none,
            chunk_nums=none,
            chunk_starts=none,
            num_recomputed=none,
            sampling_chunks=none,
        )

    @property
    def num_rows(self) -> int:
        return len(self.decode_slots) + len(self.chunk_slots)

    @cached_property
    def slots(self) -> np.ndarray:
        """[B + P] int64: of the rows that sample."""
        ending = self.chunk_slots[self.sampling_chunks]
        slots: np.ndarray = np.concatenate([self.decode_slots, ending])
        return slots


class HostLengths:
    """What the host knows of the lengths of slots when a plan comes."""

    def __init__(self, capacity: Capacity) -> None:
        self._max_drafts = capacity.num_speculative_tokens
        self._num_computed = np.zeros(capacity.max_num_seqs, np.int64)
        self._decodes = np.zeros(capacity.max_num_seqs, bool)
        self.bounds = np.zeros(capacity.max_num_seqs, np.int64)  # ids that may be known at most

    def admit(self, table: SlotTable, plan: StepPlan) -> None:
        """``plan`` was applied to ``table``."""
        for row in plan.admit:
            self._num_computed[row.slot] = row.num_cached
            self._decodes[row.slot] = False
            self.bounds[row.slot] = row.num_ids

    def rows_of(self, table: SlotTable, plan: StepPlan, recomputes_states: bool) -> PlannedRows:
        """The rows of ``plan`` whose sequences still run, as far as is known. Raises ValueError for
        a plan that gives a slot more tokens than it lacks."""
        rows = [(row.slot, 1, row.verify_depth) for row in plan.decode]
        rows += [(row.slot, row.num_tokens, 0) for row in plan.prefill]
        slots, nums, depths = np.array(rows, np.int64).reshape(-1, 3).T
        depths = np.minimum(depths, self._max_drafts)
        decodes = self._decodes[slots]
        is_open = table.is_open[slots]
        decoding, chunks = np.flatnonzero(decodes & is_open), np.flatnonzero(~decodes & is_open)
        if (nums[decoding] > 1).any():
            raise ValueError(f"plan {plan.step} gives a slot more tokens than it lacks")
        self.bounds[slots[decoding]] = np.minimum(
            self.bounds[slots[decoding]] + 1 + depths[decoding], table.end[slots[decoding]]
        )
        starts, ends = self._advance(table, slots[chunks], nums[chunks], plan.step)
        recomputed = (table.lacks_state[slots[chunks]] & recomputes_states).astype(np.int64)
        table.lacks_state[slots[chunks]] = False
        return PlannedRows(
            decode_slots=slots[decoding],
            depths=depths[decoding],
            chunk_slots=slots[chunks],
            chunk_nums=nums[chunks] + recomputed,
            chunk_starts=starts - recomputed,
            num_recomputed=recomputed,
            sampling_chunks=ends,
        )

    def _advance(
        self, table: SlotTable, slots: np.ndarray, nums: np.ndarray, step: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Where the chunks start, and which of them end what is known and may sample."""
        starts = self._num_computed[slots].copy()
        known = self.bounds[slots]
        if (starts + nums > known).any():
            raise ValueError(f"plan {step} gives a slot more tokens than it lacks")
        self._num_computed[slots] += nums
        is_done = self._num_computed[slots] == known
        is_full = known >= table.end[slots]
        self._decodes[slots] = is_done & ~is_full
        self.bounds[slots] += is_done & ~is_full
        return starts, np.flatnonzero(is_done & ~is_full)
