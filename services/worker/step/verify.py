"""Decides which sampled tokens are emitted, by the rule of ``kernels/accept``."""

from dataclasses import dataclass

import numpy as np

from kernels.accept.output import RETRIED, RUNS
from kernels.accept.rule import Accepted, accept_rows
from kernels.sample import NOT_FINITE
from services.worker.slots.table import SlotTable
from services.worker.step.rows import Rows

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class AcceptOutcome:
    """The outcome of Q sampling rows; w is one more than the most drafts of a row."""

    tokens: np.ndarray  # [Q, w] int64: sampled ids, or error codes below 0
    drafts: np.ndarray  # [Q, w - 1] int64, padded with NO_TOKEN
    num_emitted: np.ndarray  # [Q] int64: number of leading tokens that are emitted
    num_accepted: np.ndarray  # [Q] int64: number of leading drafts that are accepted and emitted
    codes: np.ndarray  # [Q] int64, as in ``kernels.accept``
    emitted: np.ndarray  # [E] int64: all emitted tokens, in order
    rows: np.ndarray  # [E] int64: their rows of the logits

    @classmethod
    def of(
        cls, tokens: np.ndarray, drafts: np.ndarray, accepted: Accepted, first_logits: np.ndarray
    ) -> "AcceptOutcome":
        """``first_logits`` [Q]: the row of the logits of each first token."""
        columns = np.arange(tokens.shape[1])
        is_emitted = columns < accepted.num_emitted[:, None]
        rows = first_logits[:, None] + columns
        return cls(tokens, drafts, *accepted, tokens[is_emitted], rows[is_emitted])

    def candidates(self) -> tuple[np.ndarray, np.ndarray]:
        """See ``Acceptance``; on the host the outcome is known at once."""
        return self.rows, np.repeat(np.arange(len(self.codes)), self.num_emitted)

    def read(self, table: SlotTable, rows: Rows) -> "tuple[Rows, AcceptOutcome]":
        return rows, self

    @property
    def has_bad_drafts(self) -> np.ndarray:
        """[Q] bool: rows recomputed without drafts because of non-finite logits."""
        bad: np.ndarray = (self.codes == RETRIED) & (self.tokens[:, 0] == NOT_FINITE)
        return bad

    @property
    def has_ended(self) -> np.ndarray:
        """[Q] bool"""
        return has_ended(self.codes)


_NONE = np.zeros(0, np.int64)
NOTHING_SAMPLED = AcceptOutcome.of(
    _NONE.reshape(0, 1), _NONE.reshape(0, 0), Accepted(_NONE, _NONE, _NONE), _NONE
)


def verify(
    table: SlotTable, computed: Rows, sampled: np.ndarray, eos_ids: np.ndarray
) -> AcceptOutcome:
    """``sampled`` [S] int64: token ids, or error codes below 0."""
    slots, num_valid = computed.sampling_slots, 1 + computed.num_drafts[computed.sampling_rows]
    columns = np.arange(int(num_valid.max(initial=1)))
    first_logits = np.cumsum(num_valid) - num_valid
    # After its valid tokens a row has tokens of other rows.
    tokens = sampled.take(first_logits[:, None] + columns, mode="clip")
    drafts = _drafts(table, slots, num_valid - 1, columns[:-1])
    accepted = accept_rows(
        tokens,
        num_valid,
        is_right=drafts == tokens[:, :-1],
        is_end=ends_text(table, slots, tokens, eos_ids),
        rooms=table.end[slots] - table.num_tokens[slots],
    )
    return AcceptOutcome.of(tokens, drafts, accepted, first_logits)


def _drafts(
    table: SlotTable, slots: np.ndarray, num_drafts: np.ndarray, columns: np.ndarray
) -> np.ndarray:
    if not len(columns):
        return np.empty((len(slots), 0), np.int64)
    positions = np.minimum(table.num_tokens[slots][:, None] + columns, table.max_len)
    found = table.ids[slots[:, None], positions].astype(np.int64)
    drafts: np.ndarray = np.where(columns < num_drafts[:, None], found, NO_TOKEN)
    return drafts


def has_ended(codes: np.ndarray) -> np.ndarray:
    """codes [Q] → [Q] bool"""
    ended: np.ndarray = (codes != RUNS) & (codes != RETRIED)
    return ended


def ends_text(
    table: SlotTable, slots: np.ndarray, tokens: np.ndarray, eos_ids: np.ndarray
) -> np.ndarray:
    """Returns [Q, w] bool: a token of ``tokens`` [Q, w] ends the output of ``slots`` [Q]."""
    is_end = (tokens[:, :, None] == eos_ids).any(2) & ~table.ignore_eos[slots, None]
    for row in np.flatnonzero(table.has_stop_ids[slots]):
        is_end[row] |= np.isin(tokens[row], table.params[slots[row]].stop_token_ids)
    ends: np.ndarray = is_end
    return ends
