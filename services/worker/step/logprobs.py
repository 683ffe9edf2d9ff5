"""The requested logprobs of sampled tokens, as buffers of a StepResult."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kernels.logprobs.num_logprobs import MAX_TOP, NO_LOGPROBS
from services.worker.machine.streams import Fetched
from services.worker.slots.table import SlotTable
from services.worker.step.results import StepLogprobs, TokenLogprobs
from services.worker.step.step import Backend, PendingResult, Sampled, Step, StepPart
from shared.wire.messages import ALL_TOKENS, MIN_LOGPROB

# Logits per piece; bounds the device memory that logprobs need.
MAX_LOGITS_AT_ONCE = 1 << 22


class _Piece(NamedTuple):
    """Logprobs of N rows of the logits, on their way to the host."""

    rows: np.ndarray  # [N] int64, ascending
    nums: np.ndarray  # [N] int64: requested number of likeliest tokens, or NO_LOGPROBS
    fetched: Fetched  # values, top ids and ranks
    is_named: bool = False  # of requested ids instead of the likeliest tokens

    def of(self, indices: np.ndarray) -> list[TokenLogprobs]:
        """Waits for the arrays; ``indices`` [n] index ``rows``."""
        values, top_ids, ranks = (each[indices] for each in self.fetched.wait())
        np.maximum(values, MIN_LOGPROB, out=values)
        make = by_likelihood if self.is_named else TokenLogprobs
        columns = values, top_ids, ranks.tolist(), self.nums[indices].tolist()
        return [
            make(own[: 1 + num], ids[:num], rank)
            for own, ids, rank, num in zip(*columns, strict=True)
        ]


class Logprobs(StepPart[list[_Piece]]):
    """Up to MAX_TOP likeliest tokens are read from ``Sampled.narrow`` if the step has it. Other
    logprobs are computed for every row of the logits that may emit its token."""

    def __init__(self, table: SlotTable, backend: Backend) -> None:
        self._table = table
        self._backend = backend

    def after_sampling(self, step: Step) -> list[_Piece] | None:
        table, sampled = self._table, step.sampled
        slots = step.rows.sampling_slots
        asked = table.num_logprobs[slots]
        if sampled is None or not (asked != NO_LOGPROBS).any():
            return None
        rows, owners = sampled.acceptance.candidates()
        vocab_size = sampled.scores.shape[-1]
        nums, has_ids = num_top_of(asked, vocab_size), table.has_logprob_ids[slots]
        pieces = []
        if sampled.narrow:
            is_narrow = (nums != NO_LOGPROBS) & (nums <= MAX_TOP) & ~has_ids
            if is_narrow.any():
                fetched = self._backend.fetch(*(each[: len(rows)] for each in sampled.narrow))
                pieces.append(_Piece(rows, np.where(is_narrow, nums, NO_LOGPROBS)[owners], fetched))
            nums[is_narrow] = NO_LOGPROBS
        is_asking, is_whole = nums != NO_LOGPROBS, nums == vocab_size
        if not is_asking.any():
            return pieces
        for is_of_kind in (is_asking & ~is_whole & ~has_ids, is_whole & ~has_ids, has_ids):
            for piece in pieces_of(np.flatnonzero(is_of_kind[owners]), vocab_size):
                pieces.append(self._ask(sampled, rows[piece], slots[owners[piece]]))
        return pieces

    def after_acceptance(self, result: PendingResult, note: list[_Piece]) -> None:
        found: dict[int, TokenLogprobs] = {}
        rows = result.outcome.rows
        for piece in note:
            indices = np.searchsorted(piece.rows, rows)
            is_here = piece.rows.take(indices, mode="clip") == rows
            is_here &= piece.nums.take(indices, mode="clip") != NO_LOGPROBS
            tokens = np.flatnonzero(is_here)
            found |= zip(tokens.tolist(), piece.of(indices[tokens]), strict=True)
        result.logprobs = StepLogprobs(found)

    def _ask(self, sampled: Sampled, rows: np.ndarray, slots: np.ndarray) -> _Piece:
        """``slots`` [n] all request ids, or all the whole vocabulary, or all likeliest tokens."""
        table, vocab_size = self._table, sampled.scores.shape[-1]
        is_named = bool(table.has_logprob_ids[slots[0]])
        nums = num_top_of(table.num_logprobs[slots], vocab_size)
        ids = logprob_ids(table, slots) if is_named else None
        num_top: int | None = int(nums.max())
        if not is_named and num_top == vocab_size:
            num_top = None
        scores, tokens = sampled.scores, sampled.tokens
        found = self._backend.sampler.logprobs(scores, tokens, num_top, rows, ids)
        fetched = self._backend.fetch(found.values, found.top_ids, found.ranks)
        return _Piece(rows, nums, fetched, is_named)


def logprob_ids(table: SlotTable, slots: np.ndarray) -> np.ndarray:
    """Returns ``logprob_token_ids`` of ``slots`` [n]: [n, longest list] int64, padded with 0."""
    ids = [table.params[slot].logprob_token_ids for slot in slots.tolist()]
    num = max(map(len, ids))
    return np.array([[*each, *[0] * (num - len(each))] for each in ids], np.int64)


def by_likelihood(values: np.ndarray, ids: np.ndarray, rank: int) -> TokenLogprobs:
    """Sorts ``ids`` [k] by logprob. ``values`` [1 + k]: the token's own logprob, then theirs."""
    order = np.lexsort((ids, -values[1:]))
    return TokenLogprobs(np.concatenate((values[:1], values[1:][order])), ids[order], rank)


def num_top_of(asked: np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns the number of likeliest tokens [n] for the requested ``asked`` [n]: at most V, and V
    for ALL_TOKENS; NO_LOGPROBS is unchanged."""
    nums: np.ndarray = np.where(asked == ALL_TOKENS, vocab_size, np.minimum(asked, vocab_size))
    return nums


def pieces_of(rows: np.ndarray, vocab_size: int) -> Iterator[np.ndarray]:
    """Splits ``rows`` [n] into pieces of at most MAX_LOGITS_AT_ONCE logits, or of one row."""
    num = max(1, MAX_LOGITS_AT_ONCE // vocab_size)
    return (rows[start : start + num] for start in range(0, len(rows), num))
