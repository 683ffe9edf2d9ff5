"""What a step did to the slots, and what it tells the scheduler."""

import numpy as np

from kernels.sample import NOT_FINITE, NOTHING_LEFT
from services.worker.batch import Batch
from services.worker.logprobs import Told
from services.worker.slots import SlotTable
from shared.messages import FinishReason, ResultRow

ERRORS = {
    NOT_FINITE: "the model computed logits that are not finite numbers (NaN or infinity)",
    NOTHING_LEFT: "the request forbids every token: allowed_token_ids, bad_words, logit_bias and"
    " min_tokens leave none",
}


def record(
    table: SlotTable, batch: Batch, tokens: np.ndarray, told: Told, eos_ids: np.ndarray
) -> tuple[list[ResultRow], np.ndarray]:
    """Adds ``tokens`` [S] to their slots and closes those that ended.

    Returns one row per sampling slot, and the int32 ids of all of them.
    """
    table.num_computed[batch.slots] += batch.num_tokens
    slots = batch.sampling_slots
    is_good = tokens >= 0
    table.append(slots[is_good], tokens[is_good])
    is_stopped = (tokens[:, None] == eos_ids).any(1) & ~table.ignore_eos[slots]
    for row in np.flatnonzero(table.has_stop_ids[slots]):
        is_stopped[row] |= int(tokens[row]) in table.params[slots[row]].stop_token_ids
    is_full = table.num_tokens[slots] >= table.end[slots]
    table.is_open[slots[is_stopped | is_full | ~is_good]] = False
    rows = [
        _row(table, slot, token, told.widths(index), _finish(stops, fills))
        for index, (slot, token, stops, fills) in enumerate(
            zip(slots.tolist(), tokens.tolist(), is_stopped.tolist(), is_full.tolist(), strict=True)
        )
    ]
    return rows, tokens[is_good].astype(np.int32)


def _row(
    table: SlotTable, slot: int, token: int, widths: tuple[int, int], finish: FinishReason | None
) -> ResultRow:
    request, attempt = table.requests[slot]
    if token < 0:
        return ResultRow(slot, request, attempt, 0, error=ERRORS[token])
    num_values, num_top_ids = widths
    return ResultRow(slot, request, attempt, 1, finish, None, num_values, num_top_ids)


def _finish(stops: bool, fills: bool) -> FinishReason | None:
    if stops:
        return "stop"
    return "length" if fills else None
