"""The logprobs that sequences asked for, as the buffers of a StepResult."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.logprobs import logprobs
from services.worker.slots import NO_LOGPROBS, SlotTable
from shared.messages import ALL_TOKENS

_NO_FLOATS = np.zeros(0, np.float32)
_NO_IDS = np.zeros(0, np.int32)


class RowTold(NamedTuple):
    """What one row tells of its token: its own logprob and the others', their ids, its rank."""

    values: np.ndarray  # [1 + k or 1 + V] float32
    top_ids: np.ndarray  # [k] int32
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


def tell_logprobs(table: SlotTable, slots: np.ndarray, logits: Tensor, tokens: np.ndarray) -> Told:
    """``slots`` and ``tokens`` [S] are those of the rows of ``logits`` [S, V], as the model
    computed them; rows whose token is an error tell nothing."""
    asked = table.num_logprobs[slots]
    is_asking = (asked != NO_LOGPROBS) & (tokens >= 0)
    if not is_asking.any():
        return Told({})
    is_whole = (asked == ALL_TOKENS) | (asked >= logits.shape[-1])
    some, whole = np.flatnonzero(is_asking & ~is_whole), np.flatnonzero(is_asking & is_whole)
    rows = dict(_rows(logits, tokens, whole, None)) if len(whole) else {}
    if len(some):
        for row, told in _rows(logits, tokens, some, int(asked[some].max())):
            num = int(asked[row])
            rows[row] = RowTold(told.values[: 1 + num], told.top_ids[:num], told.rank)
    return Told(rows)


def _rows(
    logits: Tensor, tokens: np.ndarray, rows: np.ndarray, num_top: int | None
) -> Iterator[tuple[int, RowTold]]:
    """Of ``rows`` [N] of the logits."""
    chosen = torch.from_numpy(rows).to(logits.device)
    drawn = torch.from_numpy(tokens[rows]).to(logits.device)
    found = logprobs(logits if len(rows) == len(logits) else logits[chosen], drawn, num_top)
    values = torch.cat((found.own[:, None], found.values), 1).cpu().numpy()
    ranks = found.ranks.tolist()
    ids = (
        found.top_ids.cpu().numpy()
        if found.top_ids is not None
        else np.zeros((len(rows), 0), np.int32)
    )
    for index, row in enumerate(rows.tolist()):
        yield row, RowTold(values[index], ids[index], ranks[index])
