"""Logits rules of requests, in the form of the sampler."""

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass

import numpy as np

from kernels.sample import RowChange
from services.worker.slots.guide import SlotGuide
from shared.wire.messages import SamplingParams

ANY_ID, NO_ID = -1, -2
_NO_IDS = np.zeros(0, np.int64)


class SeenIds:
    """Counts the distinct ids of a list that begins with ``ids`` [n] int32."""

    def __init__(self, ids: np.ndarray) -> None:
        distinct, counts = np.unique(ids, return_counts=True)
        self._num = len(distinct)
        self._ids = np.zeros(2 * self._num + 16, np.int64)
        self._counts = np.zeros_like(self._ids)
        self._ids[: self._num], self._counts[: self._num] = distinct, counts
        self._indices = {token_id: index for index, token_id in enumerate(distinct.tolist())}

    @property
    def ids(self) -> np.ndarray:
        """[n] int64, distinct; a view that ``add`` changes."""
        return self._ids[: self._num]

    @property
    def counts(self) -> np.ndarray:
        """[n] int64, one per id of ``ids``; a view that ``add`` changes."""
        return self._counts[: self._num]

    def with_more(self, ids: np.ndarray) -> "SeenIds":
        """Returns the counts with ``ids`` [n] appended; the original is unchanged."""
        if not len(ids):
            return self
        other = copy(self)
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        other._indices = self._indices.copy()
        for token_id in ids.tolist():
            other.add(token_id)
        return other

    def add(self, token_id: int) -> None:
        index = self._indices.setdefault(token_id, self._num)
        if index == self._num:
            self._num += 1
            if self._num > len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[index] = token_id
        self._counts[index] += 1


@dataclass(frozen=True, slots=True)
class LogitsRules:
    """The logits rules of one request as arrays, made once at admission to keep steps short.

    ``known`` are the ids of prompt and output, ``emitted`` the ids of the output, if a penalty
    needs them. ``guide`` constrains the output. ``has_points``: single ids change too.
    """

    params: SamplingParams
    allowed: np.ndarray  # [n] int64
    biased: np.ndarray  # [n] int64
    biases: np.ndarray  # [n] float32
    stop_ids: np.ndarray  # [n] int64
    word_starts: (
        np.ndarray
    )  # [W, L] int64: bad words without their last ids, left-padded with ANY_ID
    word_ends: np.ndarray  # [W] int64
    known: SeenIds | None
    emitted: SeenIds | None
    guide: SlotGuide | None
    has_points: bool

    def note(self, token_ids: list[int]) -> None:
        """``token_ids`` were emitted."""
        for seen in (self.known, self.emitted):
            if seen is not None:
                for token_id in token_ids:
                    seen.add(token_id)
        if self.guide is not None:
            self.guide.note(token_ids)


def make_logits_rules(
    params: SamplingParams, ids: np.ndarray, prompt_len: int, guide: SlotGuide | None = None
) -> LogitsRules | None:
    """The rules of a request with ``ids`` [n] int32, the first ``prompt_len`` of them the prompt.
    Most requests have none, and skip the work."""
    has_points = bool(
        params.allowed_token_ids
        or params.bad_words
        or params.logit_bias
        or params.min_tokens
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
    )
    if guide is None and not has_points:
        return None
    words = params.bad_words
    max_len = max((len(word) for word in words), default=1)
    padded = [[ANY_ID] * (max_len - len(word)) + word for word in words]
    matrix = np.array(padded, np.int64).reshape(len(words), max_len)
    return LogitsRules(
        params=params,
        allowed=np.unique(_ids(params.allowed_token_ids)),
        biased=_ids(token for token, _ in params.logit_bias),
        biases=np.array([bias for _, bias in params.logit_bias], np.float32),
        stop_ids=_ids(params.stop_token_ids),
        word_starts=matrix[:, :-1],
        word_ends=matrix[:, -1],
        known=SeenIds(ids) if params.repetition_penalty != 1 else None,
        emitted=SeenIds(ids[prompt_len:])
        if params.presence_penalty or params.frequency_penalty
        else None,
        guide=guide,
        has_points=has_points,
    )


def row_change(
    row: int,
    rules: LogitsRules,
    ids: np.ndarray,
    num_drafts: int,
    prompt_len: int,
    eos_ids: np.ndarray,
    mask: np.ndarray | None,
) -> RowChange:
    """The change for the token after ``ids``: the prompt of ``prompt_len``, output, and
    ``num_drafts`` unverified drafts. ``mask`` is the guide's."""
    params = rules.params
    drafts = ids[len(ids) - num_drafts :]
    known = rules.known and rules.known.with_more(drafts)
    emitted = rules.emitted and rules.emitted.with_more(drafts)
    hidden = [_word_ends(rules, ids[prompt_len:])]
    if len(ids) - prompt_len < params.min_tokens and not _is_complete(rules, mask):
        hidden += [rules.stop_ids, eos_ids]
    return RowChange(
        row=row,
        allowed=rules.allowed,
        hidden=np.concatenate(hidden),
        biased=rules.biased,
        biases=rules.biases,
        known=known.ids if known is not None else _NO_IDS,
        repetition_penalty=params.repetition_penalty,
        emitted=emitted.ids if emitted is not None else _NO_IDS,
        num_emitted=emitted.counts if emitted is not None else _NO_IDS,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
    )


def _is_complete(rules: LogitsRules, mask: np.ndarray | None) -> bool:
    """True if the output can only end: its grammar overrides ``min_tokens``."""
    return rules.guide is not None and mask is not None and rules.guide.leaves_ends_only(mask)


def _word_ends(rules: LogitsRules, ids: np.ndarray) -> np.ndarray:
    """The last ids of the bad words begun by the end of ``ids``."""
    if not len(rules.word_ends):
        return _NO_IDS
    starts = rules.word_starts
    max_len = starts.shape[1]
    latest = np.full(max_len, NO_ID, np.int64)
    num = min(max_len, len(ids))
    latest[max_len - num :] = ids[len(ids) - num :]
    is_next: np.ndarray = ((starts == latest) | (starts == ANY_ID)).all(1)
    return np.extract(is_next, rules.word_ends)


def _ids(ids: Iterable[int]) -> np.ndarray:
    return np.fromiter(ids, np.int64)
