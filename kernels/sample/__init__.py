"""Samples one token from each row of logits, reproducibly: the random bits follow from the seed.

The order is: logits rules (``adjust.py``) → temperature → ``filters.py`` → Gumbel-max.
``reference.py`` computes the same row by row in numpy; torch serves every device, and
``kernels/cpu/sampler.cpp`` CPUs.
"""

import torch
from torch import Tensor

from kernels.sample.adjust import Adjustments, RowChange, adjust, prepare_adjustments
from kernels.sample.filters import filtered
from kernels.sample.gumbel import gumbel_argmax
from kernels.sample.rows import MIN_TEMPERATURE, RandomRows, prepare_random_rows

__all__ = [
    "MIN_TEMPERATURE",
    "NOTHING_LEFT",
    "NOT_COMPILED",
    "NOT_FINITE",
    "Adjustments",
    "RandomRows",
    "RowChange",
    "adjust",
    "checked",
    "prepare_adjustments",
    "prepare_random_rows",
    "process",
    "sample",
]

# In place of a token that could not be sampled:
NOT_FINITE = -1  # the logits have a NaN or an infinity
NOTHING_LEFT = -2  # the request's rules hide every token
NOT_COMPILED = -3  # the mask of a grammar that is not compiled yet


def sample(logits: Tensor, random: RandomRows | None) -> Tensor:
    """logits [S, V] float32 → token ids [S] int64; rows not named by ``random`` are greedy.

    Ties go to the lowest id.
    """
    if random is None:
        return logits.argmax(-1)
    if len(random.rows) == len(logits):
        return _sample_rows(logits, random)
    tokens = logits.argmax(-1)
    return tokens.index_copy_(0, random.rows, _sample_rows(logits[random.rows], random))


def checked(tokens: Tensor, logits: Tensor, adjusted: Tensor) -> Tensor:
    """``tokens`` [S], sampled from ``adjusted`` [S, V]; a negative error code where sampling
    failed.

    ``adjusted`` may be ``logits`` itself, and these may cover only the first tokens [S, W].
    """
    if adjusted is not logits:
        tokens = torch.where(adjusted.amax(-1) == -torch.inf, NOTHING_LEFT, tokens)
    return torch.where(logits.sum(-1).isfinite(), tokens, NOT_FINITE)


def process(logits: Tensor, random: RandomRows | None) -> Tensor:
    """logits [S, V] float32 → the scores ``sample`` draws from; filtered tokens are −inf."""
    if random is None:
        return logits
    return logits.index_copy(0, random.rows, filtered(logits[random.rows], random))


def _sample_rows(logits: Tensor, random: RandomRows) -> Tensor:
    scores = filtered(logits, random)
    return gumbel_argmax(scores, random.params.seeds, random.positions, random.params.choices)
