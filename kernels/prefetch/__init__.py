"""Brings the beginning of a weight into a card's L2 cache before it is multiplied with."""

import torch
from torch import Tensor

from kernels.codes import Codes
from kernels.dispatch import runs_triton

WORD_BYTES = 4


def prefetch(weight: Tensor | Codes, num_bytes: int) -> None:
    """Reads the first ``num_bytes`` of ``weight`` [N, K], or of its codes, which is contiguous, and
    changes nothing. Where no kernels of Triton run it does nothing."""
    values = weight.codes if isinstance(weight, Codes) else weight
    if not runs_triton(values):
        return
    from kernels.prefetch.triton import launch

    num_words = min(num_bytes, values.nbytes) // WORD_BYTES
    launch(values.view(-1).view(torch.uint8)[: num_words * WORD_BYTES].view(torch.int32))
