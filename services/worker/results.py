"""What a step did to the slots, and what it tells the scheduler."""

import numpy as np

from services.worker.batch import Batch
from services.worker.slots import SlotTable
from shared.messages import FinishReason, ResultRow

NOT_FINITE = -1  # in place of a token: the row's logits had NaN or infinities
NOT_FINITE_TEXT = "the model computed logits that are not finite numbers (NaN or infinity)"


def record(
    table: SlotTable, batch: Batch, tokens: np.ndarray, eos_ids: np.ndarray
) -> tuple[list[ResultRow], np.ndarray]:
    """Adds ``tokens`` [S] to their slots and closes those that ended, also by ``eos_ids``.

    Returns one row per sampling slot, ordered by (route, slot), and the int32 ids of all of them.
    """
    table.num_computed[batch.slots] += batch.num_tokens
    order = np.lexsort((batch.sampling_slots, table.routes[batch.sampling_slots]))
    slots, tokens = batch.sampling_slots[order], tokens[order]
    is_good = tokens != NOT_FINITE
    table.append(slots[is_good], tokens[is_good])
    is_stopped = (tokens[:, None] == eos_ids).any(1) & ~table.ignore_eos[slots]
    is_full = table.num_tokens[slots] >= table.end[slots]
    table.is_open[slots[is_stopped | is_full | ~is_good]] = False
    flags = zip(is_good.tolist(), is_stopped.tolist(), is_full.tolist(), strict=True)
    rows = [_row(table, slot, *each) for slot, each in zip(slots.tolist(), flags, strict=True)]
    return rows, tokens[is_good].astype(np.int32)


def _row(table: SlotTable, slot: int, is_good: bool, is_stopped: bool, is_full: bool) -> ResultRow:
    request, attempt = table.requests[slot]
    if not is_good:
        return ResultRow(slot, request, attempt, 0, error=NOT_FINITE_TEXT)
    finish: FinishReason | None = "stop" if is_stopped else "length" if is_full else None
    return ResultRow(slot, request, attempt, 1, finish)
