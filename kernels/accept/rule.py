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
    num_emitted, num_accepted = np.zeros_like(num_valid), np.zeros_like(num_valid)
    is_stopped = np.zeros(len(tokens), bool)
    goes_on = (num_valid > 0) & (rooms > 0)
    for column in range(tokens.shape[1]):
        emits = goes_on & (tokens[:, column] >= 0)
        num_emitted += emits
        ends = emits & is_end[:, column]
        is_stopped |= ends
        if column < is_right.shape[1]:
            accepts = emits & is_right[:, column] & (column + 1 < num_valid)
            num_accepted += accepts
            goes_on = accepts & ~ends & (num_emitted < rooms)

    codes = np.where(rooms == num_emitted, FULL, RUNS)
    codes[is_stopped] = STOPPED
    first = tokens[:, 0]
    if (first < 0).any():
        codes = np.where(first < 0, first, codes)
        codes[(first == NOT_COMPILED) | ((first == NOT_FINITE) & (num_valid > 1))] = RETRIED
    codes[num_valid == 0] = CLOSED
    return Accepted(num_emitted, num_accepted, codes)
