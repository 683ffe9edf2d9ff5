"""The logprobs that sequences asked for, as the buffers of a StepResult."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch import Tensor

from services.worker.sampler import Sampler
from services.worker.slots import NO_LOGPROBS, SlotTable
from shared.messages import ALL_TOKENS

# Logits that are worked on at a time, so that what stays on the device for it is bounded.
PIECE_LOGITS = 1 << 22
# What is told of a token that cannot come, since JSON has no −∞; vLLM tells the same.
LOWEST = -9999.0

_NO_FLOATS = np.zeros(0, np.float32)
_NO_IDS = np.zeros(0, np.int32)


class RowTold(NamedTuple):
    """What one row tells of its token: its own logprob and the others', their ids, its rank."""

    values: np.ndarray  # [1 + k or 1 + V] float32
    top_ids: np.ndarray  # [k or 0] int32
    rank: int


class Told:
    """By row of the logits; rows that did not ask are missing."""

    def __init__(self, rows: dict[int, RowTold]) -> None:
        self._rows = rows

    def widths(self, row: int) -> tuple[int, int]:
        """``num_values`` and ``num_top_ids`` of a ResultRow."""
        told = self._rows.get(row)
        return (len(told.values), len(told.top_ids)) if told is not None else (0, 0)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Values, ids of the likeliest and ranks of all rows in order, concatenated."""
        told = [self._rows[row] for row in sorted(self._rows)]
        if not told:
            return _NO_FLOATS, _NO_IDS, _NO_IDS
        values = np.concatenate([each.values for each in told])
        top_ids = np.concatenate([each.top_ids for each in told])
        return values, top_ids, np.array([each.rank for each in told], np.int32)


def tell_logprobs(
    table: SlotTable, slots: np.ndarray, logits: Tensor, tokens: np.ndarray, sampler: Sampler
) -> Told:
    """``slots`` and ``tokens`` [S] are those of the rows of ``logits`` [S, V], as the model
    computed them or as they were processed; rows whose token is an error tell nothing."""
    asked, vocab_size = table.num_logprobs[slots], logits.shape[-1]
    is_asking = (asked != NO_LOGPROBS) & (tokens >= 0)
    if not is_asking.any():
        return Told({})
    nums = np.where(asked == ALL_TOKENS, vocab_size, np.minimum(asked, vocab_size))
    told: dict[int, RowTold] = {}
    for is_of_kind in (nums < vocab_size, nums == vocab_size):
        for rows in pieces(np.flatnonzero(is_asking & is_of_kind), vocab_size):
            told |= _tell(logits, tokens, rows, nums[rows], sampler)
    return Told(told)


def pieces(rows: np.ndarray, vocab_size: int) -> Iterator[np.ndarray]:
    """As many ``rows`` [n] of logits at a time as may be worked on."""
    num = max(1, PIECE_LOGITS // vocab_size)
    return (rows[start : start + num] for start in range(0, len(rows), num))


def _tell(
    logits: Tensor, tokens: np.ndarray, rows: np.ndarray, nums: np.ndarray, sampler: Sampler
) -> dict[int, RowTold]:
    """Of ``rows`` [N] of the logits; all or none of the ``nums`` [N] of likeliest tokens are V."""
    num_top = int(nums.max())
    found = sampler.logprobs(
        logits, rows, tokens[rows], num_top if num_top < logits.shape[-1] else None
    )
    values, top_ids = found.values.clamp(min=LOWEST).cpu().numpy(), found.top_ids.cpu().numpy()
    ranks = found.ranks.tolist()
    return {
        row: RowTold(values[index, : 1 + num], top_ids[index, :num], ranks[index])
        for index, (row, num) in enumerate(zip(rows.tolist(), nums.tolist(), strict=True))
    }
