"""What sequences ask to be changed in their logits, as the sampler needs it."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from kernels.sample import RowChange
from shared.messages import SamplingParams

if TYPE_CHECKING:
    from services.worker.slots import SlotTable


def needs_adjustment(params: SamplingParams) -> bool:
    """Most requests need none, and none of what follows is done for them."""
    return bool(
        params.allowed_token_ids
        or params.bad_words
        or params.logit_bias
        or params.min_tokens
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
    )


def row_changes(table: "SlotTable", slots: np.ndarray, eos_ids: np.ndarray) -> list[RowChange]:
    """The changes of the rows of logits whose ``slots`` [S] ask for some."""
    rows = np.flatnonzero(table.adjusts[slots])
    return [_row_change(table, int(row), int(slots[row]), eos_ids) for row in rows]


def _row_change(table: "SlotTable", row: int, slot: int, eos_ids: np.ndarray) -> RowChange:
    params = table.params[slot]
    ids = table.ids[slot, : table.num_tokens[slot]]
    output = ids[table.prompt_lens[slot] :]
    hidden = [_word_ends(params.bad_words, ids)]
    if len(output) < params.min_tokens:
        hidden.append(_ids(params.stop_token_ids))
        hidden.append(eos_ids if not params.ignore_eos else eos_ids[:0])
    repeats = params.repetition_penalty != 1
    penalizes = params.presence_penalty or params.frequency_penalty
    emitted, num_emitted = np.unique(output if penalizes else output[:0], return_counts=True)
    return RowChange(
        row,
        np.unique(_ids(params.allowed_token_ids)),
        np.unique(np.concatenate(hidden)),
        _ids(token for token, _ in params.logit_bias),
        np.array([bias for _, bias in params.logit_bias], np.float32),
        np.unique(ids if repeats else ids[:0]).astype(np.int64),
        params.repetition_penalty,
        emitted.astype(np.int64),
        num_emitted,
        params.presence_penalty,
        params.frequency_penalty,
    )


def _word_ends(words: list[list[int]], ids: np.ndarray) -> np.ndarray:
    """The last id of each word whose other ids are the last that are known."""
    ends = []
    for *start, end in words:
        if len(start) <= len(ids) and ids[len(ids) - len(start) :].tolist() == start:
            ends.append(end)
    return _ids(ends)


def _ids(ids: Iterable[int]) -> np.ndarray:
    return np.fromiter(ids, np.int64)
