"""The rule of acceptance, of many rows at once; ``triton.py`` has the same one for CUDA devices."""

from typing import NamedTuple

import numpy as np

from kernels.accept.output import CLOSED, FULL, RETRIED, RUNS, STOPPED
from kernels.sample import NOT_COMPILED, NOT_FINITE


class Accepted(NamedTuple):
    num_emitted: np.ndarray  # [R]: the first of the tokens
    num_accepted: np.ndarray  # [R]: the first of the drafts, which are emitted
    codes: np.ndarray  # [R]


def accept_rows(
    tokens: np.ndarray,
    num_valid: np.ndarray,
    is_right: np.ndarray,
    is_end: np.ndarray,
    rooms: np.ndarray,
) -> Accepted:
    """Of ``tokens`` [R, w] the first ``num_valid`` [R] were sampled: the one after the last known
    id, and after each draft. ``is_right`` [R, w - 1]: the draft is accepted if all before it are.
    ``is_end`` [R, w]: the token ends the text. ``rooms`` [R]: tokens that may be emitted.

    Below 0 is what is wrong with a token. A row fails if its first one is wrong; a later one is
    sampled again in the next step.

    Numbers that are not finite may be a draft's, since 0 · NaN is NaN where it should be hidden:
    such a row emits nothing, loses its drafts and is computed once more without. So does a row
    whose grammar is not compiled.
    """
    columns = np.arange(tokens.shape[1])
    is_valid = columns < num_valid[:, None]
    num_right = (is_right & is_valid[:, 1:]).cumprod(1).sum(1)
    num_good = _first((tokens < 0) & is_valid, columns)
    num_to_end = _first(is_end & is_valid, columns) + 1
    num_emitted = np.minimum(np.minimum(1 + num_right, num_good), np.minimum(num_to_end, rooms))
    is_closed = num_valid == 0
    num_emitted[is_closed] = 0

    first = tokens[:, 0]
    is_retried = ((first == NOT_FINITE) & (num_valid > 1)) | (first == NOT_COMPILED)
    codes = np.where(rooms == num_emitted, FULL, RUNS)
    codes[num_to_end == num_emitted] = STOPPED
    fails = num_good == 0
    codes[fails] = first[fails]
    codes[is_retried] = RETRIED
    codes[is_closed] = CLOSED
    return Accepted(num_emitted, np.minimum(num_right, num_emitted), codes)


def _first(flags: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Returns the first true column of each row [R, w], or one beyond what a row may have."""
    first: np.ndarray = np.where(flags, columns, len(columns) + 1).min(1)
    return first
