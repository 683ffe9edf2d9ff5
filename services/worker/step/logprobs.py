"""The logprobs that sequences asked for, as the buffers of a StepResult."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kernels.logprobs.num_logprobs import MAX_TOP, NO_LOGPROBS
from services.worker.machine.streams import Fetched
from services.worker.slots.table import SlotTable
from services.worker.step.results import StepLogprobs, TokenLogprobs
from services.worker.step.step import Backend, PendingResult, Sampled, Step, StepPart
from shared.wire.messages import ALL_TOKENS, MIN_LOGPROB

# Logits that are worked on at a time, so that what stays on the device for it is bounded.
MAX_LOGITS_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class _Piece:
    """Logprobs of N rows of the logits, on their way to the host."""

    rows: np.ndarray  # [N] int64, ascending
    nums: np.ndarray  # [N] int64: how many of the likeliest the request wants
    places: np.ndarray  # [N] int64, indices into what is fetched
    fetched: Fetched  # values, top ids and ranks
    is_named: bool = False  # of ids that the requests name

    def of(self, indices: np.ndarray) -> list[TokenLogprobs]:
        """``indices`` [n] into ``rows``. Waits."""
        all_values, top_ids, ranks = self.fetched.wait()
        places, nums = self.places[indices], self.nums[indices].tolist()
        values = all_values[places]
        np.maximum(values, MIN_LOGPROB, out=values)
        make = by_likelihood if self.is_named else TokenLogprobs
        columns = values, top_ids[places], ranks[places].tolist(), nums
        return [
            make(own[: 1 + num], ids[:num], rank)
            for own, ids, rank, num in zip(*columns, strict=True)
        ]


class Logprobs(StepPart[list[_Piece]]):
    """A step that has logprobs of its own gives those of few likeliest tokens; others are computed
    for every row whose token may be emitted."""

    def __init__(self, table: SlotTable, backend: Backend) -> None:
        self._table = table
        self._backend = backend

    def after_sampling(self, step: Step) -> list[_Piece] | None:
        table, sampled = self._table, step.sampled
        slots = step.rows.sampling_slots
        is_asking = table.num_logprobs[slots] != NO_LOGPROBS
        if sampled is None or not is_asking.any():
            return None
        rows, owners = sampled.candidates()
        kept = np.flatnonzero(is_asking[owners])
        rows, slots = rows[kept], slots[owners[kept]]
        vocab_size = sampled.scores.shape[-1]
        nums, has_ids = (
            num_top_of(table.num_logprobs[slots], vocab_size),
            table.has_logprob_ids[slots],
        )
        pieces = []
        if sampled.narrow:
            is_narrow = ~has_ids & (nums <= MAX_TOP)
            if is_narrow.any():
                pieces.append(self._narrow(sampled, rows[is_narrow], nums[is_narrow]))
            rows, slots = rows[~is_narrow], slots[~is_narrow]
            nums, has_ids = nums[~is_narrow], has_ids[~is_narrow]
        is_whole = nums == vocab_size
        for is_of_kind in (~has_ids & ~is_whole, ~has_ids & is_whole, has_ids):
            for some in pieces_of(np.flatnonzero(is_of_kind), vocab_size):
                ids = logprob_ids(table, slots[some]) if has_ids[some[0]] else None
                pieces.append(self._ask(sampled, rows[some], nums[some], ids))
        return pieces

    def after_acceptance(self, result: PendingResult, note: list[_Piece]) -> None:
        found: dict[int, TokenLogprobs] = {}
        rows = result.outcome.rows
        for piece in note:
            indices = np.searchsorted(piece.rows, rows)
            tokens = np.flatnonzero(piece.rows.take(indices, mode="clip") == rows)
            found |= zip(tokens.tolist(), piece.of(indices[tokens]), strict=True)
        result.logprobs = StepLogprobs(found)

    def _narrow(self, sampled: Sampled, rows: np.ndarray, nums: np.ndarray) -> _Piece:
        return _Piece(rows, nums, rows, self._backend.fetch(*sampled.narrow))

    def _ask(
        self, sampled: Sampled, rows: np.ndarray, nums: np.ndarray, ids: np.ndarray | None
    ) -> _Piece:
        """All or none of the ``nums`` [N] of likeliest tokens are V, unless ``ids`` [N, the most of
        them] say which are wanted."""
        scores, tokens = sampled.scores, sampled.tokens
        num_top: int | None = int(nums.max())
        if ids is None and num_top == scores.shape[-1]:
            num_top = None
        found = self._backend.sampler.logprobs(scores, tokens, num_top, rows, ids)
        fetched = self._backend.fetch(found.values, found.top_ids, found.ranks)
        return _Piece(rows, nums, np.arange(len(rows)), fetched, is_named=ids is not None)


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


def pieces_of(rows: np.ndarray, vocab_size: int) -> Iterator[np.ndarray]:
    """Splits ``rows`` [n] of logits into pieces that fit the scratch memory."""
    num = max(1, MAX_LOGITS_AT_ONCE // vocab_size)
    return (rows[start : start + num] for start in range(0, len(rows), num))
