"""Rotary positions (arXiv 2104.09864); the halves of a head are the pairs."""

import torch
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D], cos and sin [T, 1, D] in float32 → [T, H, D].

    ``sin`` is negative in its first half, so that a rotation of the head's elements by D/2 brings
    every element its partner: three operations on every device.
    """
    wide = x.float()
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)
