"""Hides the ids that a grammar does not allow.

``reference.py`` does it bit by bit; torch serves CPUs, Triton CUDA devices.
"""

import torch
from torch import Tensor

from kernels.dispatch import runs_triton

HIDDEN = float("-inf")
_BITS = torch.arange(256)[:, None] >> torch.arange(8) & 1
_SUMMANDS = torch.where(_BITS == 1, 0.0, HIDDEN)  # added to each byte's bits, without a branch


def hide(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Sets ids not allowed by a grammar to −inf, in place.

    logits [S, V] float32 are finite. Each of ``rows`` [M] int64 occurs once and keeps the ids with
    a set bit in ``masks`` [M, ⌈V / 32⌉] int32: id i is bit i % 32 of word i // 32.
    """
    if runs_triton(logits):
        from kernels.grammar_mask.triton import launch

        launch(logits, rows, masks)
        return
    summands = _SUMMANDS.index_select(0, masks.view(torch.uint8).int().flatten())
    logits.index_add_(0, rows, summands.view(len(rows), 32 * masks.shape[1])[:, : logits.shape[1]])
