"""The pairs in an MTP head's KV cache: the head pauses while no drafts are planned.

Each sequence remembers the position from which it has all pairs, and attends to no earlier ones.
Each block remembers if it is complete, for sequences that find it in the prefix cache. The head's
layer sees all keys, so its blocks are of the first group of layers.
"""

import numpy as np

from services.worker.slots.table import SlotTable
from shared.wire.messages import Capacity, StepPlan

FIRST_ENTRY = 1  # there is no pair before the first token


class MtpCoverage:
    """A slot has the pairs of the places ``starts`` up to, not including, ``ends``; [S] int64."""

    def __init__(self, capacity: Capacity) -> None:
        self.starts = np.zeros(capacity.max_num_seqs, np.int64)
        self.ends = np.zeros(capacity.max_num_seqs, np.int64)
        self._is_whole = np.zeros(capacity.num_blocks + 1, bool)  # complete blocks

    def begin(self, table: SlotTable, plan: StepPlan, fresh_blocks: np.ndarray) -> None:
        """``plan`` was applied to ``table``; ``fresh_blocks`` [N] int64 have new owners."""
        self._is_whole[fresh_blocks] = False
        for row in plan.admit:
            num_cached = row.num_cached // table.block_size
            is_lacking = np.flatnonzero(~self._is_whole[row.blocks[:num_cached]])
            num_lacking = is_lacking[-1] + 1 if len(is_lacking) else 0
            self.starts[row.slot] = max(FIRST_ENTRY, num_lacking * table.block_size)
            self.ends[row.slot] = max(FIRST_ENTRY, row.num_cached)

    def note(
        self, table: SlotTable, slots: np.ndarray, first: np.ndarray, last: np.ndarray,
        num_known: np.ndarray,
    ) -> None:  # fmt: skip
        """``slots`` [R] get the pairs of the places ``first`` to ``last`` [R]. Pairs of the
        ``num_known`` [R] known ids are final."""
        self.starts[slots] = np.where(self.ends[slots] == first, self.starts[slots], first)
        self.ends[slots] = np.minimum(last + 1, num_known)
        starts, size = self.starts[slots], table.block_size
        lows = np.maximum(first // size, np.where(starts > FIRST_ENTRY, -(-starts // size), 0))
        highs = self.ends[slots] // size
        for row in np.flatnonzero(highs > lows).tolist():
            self._is_whole[table.block_tables[0, slots[row], lows[row] : highs[row]]] = True
