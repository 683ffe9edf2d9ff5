"""What sequences ask to be changed in their logits, as the sampler needs it."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kernels.sample import RowChange
from shared.messages import SamplingParams

ANY_ID, NO_ID = -1, -2
_NO_IDS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Wishes:
    """The lists of one request as arrays: made once, at admission, since steps have no time."""

    params: SamplingParams
    allowed: np.ndarray  # [n] int64
    biased: np.ndarray  # [n] int64
    biases: np.ndarray  # [n] float32
    stop_ids: np.ndarray  # [n] int64
    word_starts: np.ndarray  # [W, L] int64: bad words but their last ids, after ANY_IDs
    word_ends: np.ndarray  # [W] int64


def wishes_of(params: SamplingParams) -> Wishes | None:
    """Most requests have none, and none of what follows is done for them."""
    if not (
        params.allowed_token_ids
        or params.bad_words
        or params.logit_bias
        or params.min_tokens
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
    ):
        return None
    words = params.bad_words
    max_len = max((len(word) for word in words), default=1)
    padded = [[ANY_ID] * (max_len - len(word)) + word for word in words]
    matrix = np.array(padded, np.int64).reshape(len(words), max_len)
    return Wishes(
        params,
        np.unique(_ids(params.allowed_token_ids)),
        _ids(token for token, _ in params.logit_bias),
        np.array([bias for _, bias in params.logit_bias], np.float32),
        _ids(params.stop_token_ids),
        matrix[:, :-1],
        matrix[:, -1],
    )


def row_change(
    row: int, wishes: Wishes, ids: np.ndarray, prompt_len: int, eos_ids: np.ndarray
) -> RowChange:
    """For the token after ``ids``, all that are known, of which ``prompt_len`` are the prompt."""
    params, output = wishes.params, ids[prompt_len:]
    hidden = [_word_ends(wishes, ids)]
    if len(output) < params.min_tokens:
        hidden += [wishes.stop_ids, _NO_IDS if params.ignore_eos else eos_ids]
    known = np.unique(ids) if params.repetition_penalty != 1 else _NO_IDS
    penalizes = params.presence_penalty or params.frequency_penalty
    emitted, num_emitted = np.unique(output if penalizes else _NO_IDS, return_counts=True)
    return RowChange(
        row,
        wishes.allowed,
        np.concatenate(hidden),
        wishes.biased,
        wishes.biases,
        known.astype(np.int64),
        params.repetition_penalty,
        emitted.astype(np.int64),
        num_emitted,
        params.presence_penalty,
        params.frequency_penalty,
    )


def _word_ends(wishes: Wishes, ids: np.ndarray) -> np.ndarray:
    """The last id of each bad word whose other ids are the last that are known."""
    starts = wishes.word_starts
    max_len = starts.shape[1]
    latest = np.full(max_len, NO_ID, np.int64)
    num = min(max_len, len(ids))
    latest[max_len - num :] = ids[len(ids) - num :]
    is_next: np.ndarray = ((starts == latest) | (starts == ANY_ID)).all(1)
    return np.extract(is_next, wishes.word_ends)


def _ids(ids: Iterable[int]) -> np.ndarray:
    return np.fromiter(ids, np.int64)
