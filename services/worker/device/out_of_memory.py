"""What is said where a GPU's memory is short."""

import numpy as np

from kernels.logprobs import NO_LOGPROBS
from services.worker.results import Part
from services.worker.slots import SlotTable
from shared.messages import ResultRow, StepPlan
from shared.token_arrays import TokenArrays

REMEDIES = "lower gpu-memory-utilization, max-num-batched-tokens or max-num-seqs"


def fail(table: SlotTable, slots: np.ndarray, problem: str) -> list[Part]:
    """Closes ``slots`` [n], and what is told of them."""
    table.is_open[slots] = False
    table.num_prompt_logprobs[slots] = NO_LOGPROBS  # nor is more told of the step before
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

    def add(self, table: SlotTable, slots: np.ndarray, starts: np.ndarray) -> None:
        """Those of ``slots`` [n] from the positions ``starts`` [n] on."""
        firsts = starts // table.block_size
        for slot, first in zip(slots.tolist(), firsts.tolist(), strict=True):
            self._blocks.update(table.block_tables[slot, first:].tolist())
        self._blocks.discard(table.null_block)

    def release(self, fresh_blocks: np.ndarray) -> None:
        """They will be written anew."""
        if self._blocks:
            self._blocks.difference_update(fresh_blocks.tolist())

    def readers(self, table: SlotTable, plan: StepPlan) -> np.ndarray:
        """Slots [n] that are admitted on such blocks: what they were to compute is lost as well."""
        if not self._blocks:
            return np.zeros(0, np.int64)
        found = [row for row in plan.admit if not self._blocks.isdisjoint(row.blocks)]
        slots = np.array([row.slot for row in found], np.int64)
        self.add(table, slots, np.array([row.num_cached for row in found], np.int64))
        return slots
