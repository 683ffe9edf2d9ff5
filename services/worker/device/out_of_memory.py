"""What is said where a GPU's memory is short."""

import numpy as np

from services.worker.results import Part
from services.worker.slots import SlotTable
from shared.messages import ResultRow, StepPlan
from shared.token_arrays import TokenArrays

REMEDIES = "lower gpu-memory-utilization, max-num-batched-tokens or max-num-seqs"


def fail(table: SlotTable, slots: np.ndarray, problem: str) -> list[Part]:
    """Closes ``slots`` [n], and what is told of them."""
    table.is_open[slots] = False
    error = f"the GPU's memory does not suffice: {problem}; {REMEDIES}"
    requests = [table.requests[slot] for slot in slots.tolist()]
    return [
        Part(ResultRow(slot, request, attempt, 0, error=error), TokenArrays())
        for slot, (request, attempt) in zip(slots.tolist(), requests, strict=True)
    ]


class LostBlocks:
    """Blocks of prompts that could not be computed. The next plan may have been made before the
    scheduler learnt of it, and take them for a prefix that is cached."""

    def __init__(self) -> None:
        self._blocks: set[int] = set()

    def add(self, table: SlotTable, slots: np.ndarray) -> None:
        self._blocks.update(table.block_tables[slots].ravel().tolist())
        self._blocks.discard(table.null_block)

    def release(self, fresh_blocks: np.ndarray) -> None:
        """They will be written anew."""
        if self._blocks:
            self._blocks.difference_update(fresh_blocks.tolist())

    def readers(self, plan: StepPlan) -> np.ndarray:
        """Slots [n] that are admitted on such blocks."""
        found = [row.slot for row in plan.admit if not self._blocks.isdisjoint(row.blocks)]
        return np.array(found, np.int64)
