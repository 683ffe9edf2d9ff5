"""Hides the ids that a grammar does not allow.

``reference.py`` does it bit by bit; torch serves CPUs, Triton CUDA devices.
"""

import torch
from torch import Tensor

from kernels.dispatch import runs_triton

HIDDEN = float("-inf")


def hide(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """logits [S, V] float32, of which ``rows`` [M] int64, each once, keep the ids whose bits are
    set in ``masks`` [M, ⌈V / 32⌉] int32: id i is bit i % 32 of word i // 32. The others become
    −inf."""
    if runs_triton(logits):
        from kernels.grammar_mask.triton import launch

        launch(logits, rows, masks)
        return
    shifts = torch.arange(8, dtype=torch.uint8)
    for row, mask in zip(rows.tolist(), masks.view(torch.uint8), strict=True):
        is_hidden = (mask[:, None] >> shifts & 1).flatten()[: logits.shape[1]] == 0
        logits[row].masked_fill_(is_hidden, HIDDEN)
