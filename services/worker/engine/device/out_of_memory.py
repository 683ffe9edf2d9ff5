"""Fails sequences and plans for which a GPU's memory does not suffice."""

import numpy as np

from kernels.logprobs.num_logprobs import NO_LOGPROBS
from services.worker.slots.table import SlotTable
from services.worker.step.results import RowPart
from shared.wire.messages import NO_TOKENS, ResultRow
from shared.wire.token_arrays import TokenArrays

REMEDIES = "lower gpu-memory-utilization, max-num-batched-tokens or max-num-seqs"


def fail(table: SlotTable, slots: np.ndarray, problem: str) -> list[RowPart]:
    """Closes ``slots`` [n]; returns the parts of the result with an error for each."""
    table.is_open[slots] = False
    table.num_prompt_logprobs[slots] = NO_LOGPROBS  # nor do more come of the step before
    error = f"the GPU's memory does not suffice: {problem}; {REMEDIES}"
    requests = [table.requests[slot] for slot in slots.tolist()]
    return [
        RowPart(ResultRow(slot, request, attempt, NO_TOKENS, error=error), TokenArrays())
        for slot, (request, attempt) in zip(slots.tolist(), requests, strict=True)
    ]
