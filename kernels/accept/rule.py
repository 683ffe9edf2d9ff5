"""The rule of acceptance over many rows; ``triton.py`` implements it for CUDA devices."""

from typing import NamedTuple

import numpy as np

from kernels.accept.output import CLOSED, FULL, RETRIED, RUNS, STOPPED
from kernels.sample import NOT_COMPILED, NOT_FINITE


class Accepted(NamedTuple):
    num_emitted: np.ndarray  # [R]: number of leading tokens that are emitted
    num_accepted: np.ndarray  # [R]: number of leading drafts that are accepted and emitted
    codes: np.ndarray  # [R]


def accept_rows(
    tokens: np.ndarray,
    num_valid: np.ndarray,
    is_right: np.ndarray,
    is_end: np.ndarray,
    rooms: np.ndarray,
) -> Accepted:
    """The first ``num_valid`` [R] of ``tokens`` [R, w] were sampled: one after the last known id
    and one after each draft. ``is_right`` [R, w - 1]: the draft equals the sampled token; it is
    accepted if all drafts before it are. ``is_end`` [R, w]: the token ends the output. ``rooms``
    [R]: the most tokens that may be emitted.

    A negative token is an error code. An error in the first token fails the row; an error in a
    later token ends the accepted part, and its position is sampled again in the next step.

    Non-finite logits may be caused by a draft, since 0 · NaN is NaN even for a masked key. Such a
    row emits nothing, loses its drafts and is computed once more without them. So does a row whose
    grammar is not compiled yet.
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
