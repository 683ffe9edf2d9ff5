"""Decides which sampled tokens are emitted; speculation never changes the text.

A draft is accepted if it is the token that was sampled in its position, so the token sampled after
the accepted drafts is the one that would have been sampled without drafts.
"""

from dataclasses import dataclass

import numpy as np

from kernels.sample import NOT_COMPILED, NOT_FINITE
from services.worker.slots.table import SlotTable
from services.worker.step.batch import Batch

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class AcceptOutcome:
    """The outcome of the Q rows that sample; w is one more than the most drafts of a row."""

    tokens: np.ndarray  # [Q, w] int64: what was sampled, or below 0 why nothing was
    drafts: np.ndarray  # [Q, w - 1] int64, NO_TOKEN where there is none
    num_emitted: np.ndarray  # [Q] int64: the first of the tokens
    num_accepted: np.ndarray  # [Q] int64: the first of the drafts, which are emitted
    errors: np.ndarray  # [Q] int64: 0, or NOT_FINITE or NOTHING_LEFT
    is_stopped: np.ndarray  # [Q] bool: the last one emitted ends the text
    is_full: np.ndarray  # [Q] bool: there is no room for more
    emitted: np.ndarray  # [E] int64: all tokens that are emitted, in order
    rows: np.ndarray  # [E] int64: the rows of the logits that they are from

    @property
    def has_bad_drafts(self) -> np.ndarray:
        """[Q] bool: the row is computed again, since logits at its drafts were not finite."""
        bad: np.ndarray = (self.tokens[:, 0] == NOT_FINITE) & (self.errors == 0)
        return bad

    @property
    def has_ended(self) -> np.ndarray:
        """[Q] bool"""
        ended: np.ndarray = self.is_stopped | self.is_full | (self.errors < 0)
        return ended


def verify(
    table: SlotTable, batch: Batch, sampled: np.ndarray, eos_ids: np.ndarray
) -> AcceptOutcome:
    """``sampled`` [S] int64, token ids or below 0 what is wrong with the row. A row fails if its
    first one is wrong; a later one is sampled again in the next step.

    Numbers that are not finite may be a draft's, since 0 · NaN is NaN where it should be hidden:
    such a row emits nothing, loses its drafts and is computed once more without. So does a row
    whose grammar is not compiled.
    """
    slots, num_drafts = batch.sampling_slots, batch.num_drafts[batch.sampling_rows]
    starts = np.cumsum(1 + num_drafts) - 1 - num_drafts
    columns = np.arange(1 + int(num_drafts.max(initial=0)))
    is_there = columns <= num_drafts[:, None]
    tokens = sampled[np.where(is_there, starts[:, None] + columns, 0)]
    drafts = _drafts(table, slots, num_drafts, columns[:-1])
    is_right = np.cumprod(drafts == tokens[:, :-1], 1)
    nums = 1 + is_right.sum(1)  # of each row, if nothing ends it before
    wrong = _first(tokens < 0)
    first = tokens[:, 0]
    is_retried = ((first == NOT_FINITE) & (num_drafts > 0)) | (first == NOT_COMPILED)
    is_last = _ends_text(table, slots, tokens, eos_ids)
    rooms = table.end[slots] - table.num_tokens[slots]
    ends = _first(is_last) + 1
    num_emitted = np.minimum(np.minimum(nums, wrong), np.minimum(ends, rooms))
    is_emitted = columns < num_emitted[:, None]
    return AcceptOutcome(
        tokens,
        drafts,
        num_emitted,
        np.minimum(nums - 1, num_emitted),
        np.where((wrong == 0) & ~is_retried, first, 0),
        ends == num_emitted,
        rooms == num_emitted,
        tokens[is_emitted],
        (starts[:, None] + columns)[is_emitted],
    )


def _drafts(
    table: SlotTable, slots: np.ndarray, num_drafts: np.ndarray, columns: np.ndarray
) -> np.ndarray:
    positions = np.minimum(table.num_tokens[slots][:, None] + columns, table.max_len)
    found = table.ids[slots[:, None], positions].astype(np.int64)
    drafts: np.ndarray = np.where(columns < num_drafts[:, None], found, NO_TOKEN)
    return drafts


def _ends_text(
    table: SlotTable, slots: np.ndarray, tokens: np.ndarray, eos_ids: np.ndarray
) -> np.ndarray:
    is_end = (tokens[:, :, None] == eos_ids).any(2) & ~table.ignore_eos[slots, None]
    for row in np.flatnonzero(table.has_stop_ids[slots]):
        is_end[row] |= np.isin(tokens[row], table.params[slots[row]].stop_token_ids)
    ends: np.ndarray = is_end
    return ends


def _first(flags: np.ndarray) -> np.ndarray:
    """Returns the first true column of each row [Q, w], or one beyond what a row may have."""
    first: np.ndarray = np.where(flags.any(1), flags.argmax(1), flags.shape[1] + 1)
    return first
