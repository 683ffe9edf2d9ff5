"""The logprobs that sequences asked for, as the buffers of a StepResult."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch import Tensor

from kernels.logprobs.num_logprobs import NO_LOGPROBS
from services.worker.slots.table import SlotTable
from services.worker.step.sampler import Sampler
from services.worker.step.verify import AcceptOutcome
from shared.wire.messages import ALL_TOKENS, MIN_LOGPROB

# Logits that are worked on at a time, so that what stays on the device for it is bounded.
MAX_LOGITS_AT_ONCE = 1 << 22

_NO_FLOATS = np.zeros(0, np.float32)
_NO_IDS = np.zeros(0, np.int32)


class TokenLogprobs(NamedTuple):
    """The logprobs of one row: its token's own and those of the likeliest, their ids, its rank."""

    values: np.ndarray  # [1 + k or 1 + V] float32
    top_ids: np.ndarray  # [k or 0] int32
    rank: int


class StepLogprobs:
    """Logprobs by index of the token, only of those for which the request asked."""

    def __init__(self, tokens: dict[int, TokenLogprobs]) -> None:
        self._tokens = tokens

    def widths(self, index: int) -> tuple[int, int]:
        """Returns ``num_values`` and ``num_top_ids`` of the run that begins with a token."""
        by_token = self._tokens.get(index)
        return (len(by_token.values), len(by_token.top_ids)) if by_token is not None else (0, 0)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns values, ids of the likeliest and ranks of all tokens in order, concatenated."""
        by_token = [self._tokens[index] for index in sorted(self._tokens)]
        if not by_token:
            return _NO_FLOATS, _NO_IDS, _NO_IDS
        values = np.concatenate([each.values for each in by_token])
        top_ids = np.concatenate([each.top_ids for each in by_token])
        return values, top_ids, np.array([each.rank for each in by_token], np.int32)


def gather_logprobs(
    table: SlotTable,
    slots: np.ndarray,
    outcome: AcceptOutcome,
    logits: Tensor,
    sampler: Sampler,
) -> StepLogprobs:
    """Returns the logprobs of the E emitted tokens; ``slots`` [S] are those of the rows of
    ``logits`` [S, V], raw or processed."""
    rows = outcome.rows
    slots, tokens = slots[rows], outcome.emitted
    asked, vocab_size = table.num_logprobs[slots], logits.shape[-1]
    is_asking = asked != NO_LOGPROBS
    if not is_asking.any():
        return StepLogprobs({})
    nums, has_ids = num_top_of(asked, vocab_size), table.has_logprob_ids[slots]
    by_token: dict[int, TokenLogprobs] = {}
    for is_of_kind in (~has_ids & (nums < vocab_size), ~has_ids & (nums == vocab_size), has_ids):
        for some in pieces(np.flatnonzero(is_asking & is_of_kind), vocab_size):
            ids = logprob_ids(table, slots[some]) if has_ids[some[0]] else None
            found = _gather(logits, rows[some], tokens[some], nums[some], sampler, ids)
            by_token |= zip(some.tolist(), found, strict=True)
    return StepLogprobs(by_token)


def logprob_ids(table: SlotTable, slots: np.ndarray) -> np.ndarray:
    """Returns the ids whose logprobs ``slots`` [n] ask for by name: [n, the most] int64, filled up
    with 0."""
    ids = [table.params[slot].logprob_token_ids for slot in slots.tolist()]
    num = max(map(len, ids))
    return np.array([[*each, *[0] * (num - len(each))] for each in ids], np.int64)


def by_likelihood(values: np.ndarray, ids: np.ndarray, rank: int) -> TokenLogprobs:
    """``values`` [1 + k] are the token's own and those of ``ids`` [k], in any order."""
    order = np.lexsort((ids, -values[1:]))
    return TokenLogprobs(np.concatenate((values[:1], values[1:][order])), ids[order], rank)


def num_top_of(asked: np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns how many of the likeliest tokens [n] get a logprob where requests ask for ``asked``
    [n]: V for all; NO_LOGPROBS stays what it is."""
    nums: np.ndarray = np.where(asked == ALL_TOKENS, vocab_size, np.minimum(asked, vocab_size))
    return nums


def pieces(rows: np.ndarray, vocab_size: int) -> Iterator[np.ndarray]:
    """Splits ``rows`` [n] of logits into pieces that fit the scratch memory."""
    num = max(1, MAX_LOGITS_AT_ONCE // vocab_size)
    return (rows[start : start + num] for start in range(0, len(rows), num))


def _gather(
    logits: Tensor,
    rows: np.ndarray,
    tokens: np.ndarray,
    nums: np.ndarray,
    sampler: Sampler,
    ids: np.ndarray | None,
) -> list[TokenLogprobs]:
    """Returns the logprobs of ``rows`` [N] of the logits; all or none of the ``nums`` [N] of
    likeliest tokens are V, unless ``ids`` [N, the most of them] say which are wanted."""
    num_top: int | None = int(nums.max())
    if ids is None and num_top == logits.shape[-1]:
        num_top = None
    found = sampler.logprobs(logits, rows, tokens, num_top, ids)
    values, top_ids = found.values.clamp(min=MIN_LOGPROB).cpu().numpy(), found.top_ids.cpu().numpy()
    make = TokenLogprobs if ids is None else by_likelihood
    return [
        make(values[index, : 1 + num], top_ids[index, :num], rank)
        for index, (num, rank) in enumerate(zip(nums.tolist(), found.ranks.tolist(), strict=True))
    ]
