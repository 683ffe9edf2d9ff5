"""Fails sequences if a GPU's memory does not suffice."""

import logging

import numpy as np
import torch

from kernels.logprobs.num_logprobs import NO_LOGPROBS
from services.worker.slots.table import SlotTable
from services.worker.step.results import RowPart
from services.worker.step.step import PendingResult, Step, StepPart
from shared.wire.messages import NO_TOKENS, ResultRow, StepPlan
from shared.wire.token_arrays import TokenArrays

log = logging.getLogger(__name__)

REMEDIES = "lower gpu-memory-utilization, max-num-batched-tokens or max-num-seqs"


class FailedPrompts(StepPart[list[RowPart]]):
    """Each sequence that fails in a step gets a row with an error."""

    is_of_every_step = True

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._failed: list[RowPart] = []
        self._has_failed = False  # prompts of the previous step

    def fail_chunks(self, step: Step, problem: str) -> None:
        """Fails the prompt chunks of ``step`` and removes them. Raises torch.OutOfMemoryError if it
        has none."""
        slots = step.rows.chunks.slots
        if not len(slots):
            raise torch.OutOfMemoryError(f"a decode step: {problem}; {REMEDIES}")
        log.error("a step with %d prompts: %s; %s", len(slots), problem, REMEDIES)
        self._fail(slots, problem)
        step.rows = step.rows.decoding

    def fail_hits(self, plan: StepPlan) -> None:
        """Fails the sequences of ``plan`` with a cached prefix if prompts of the previous step
        failed. The scheduler did not know of the failure yet, so the prefix may have blocks of a
        failed prompt."""
        if self._has_failed:
            slots = np.array([row.slot for row in plan.admit if row.num_cached], np.int64)
            self._fail(slots, "a prefix of its prompt was not computed")

    def after_sampling(self, step: Step) -> list[RowPart] | None:
        failed, self._failed = self._failed, []
        self._has_failed = bool(failed)
        return failed or None

    def rows_of(self, result: PendingResult, note: list[RowPart]) -> list[RowPart]:
        return note

    def _fail(self, slots: np.ndarray, problem: str) -> None:
        """Closes ``slots`` [n]."""
        table = self._table
        table.is_open[slots] = False
        table.num_prompt_logprobs[slots] = NO_LOGPROBS  # results in flight return none
        error = f"the GPU's memory does not suffice: {problem}; {REMEDIES}"
        for slot in slots.tolist():
            request, attempt = table.requests[slot]
            row = ResultRow(slot, request, attempt, NO_TOKENS, error=error)
            self._failed.append(RowPart(row, TokenArrays()))
