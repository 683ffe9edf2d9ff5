"""Rotary positions (arXiv 2104.09864): each pair of a head's elements turns by its own angle.

``sin`` is negative for the first of a pair, so that an element needs its partner and no sign:
three operations on every device.
"""

import torch
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D], cos and sin [T, 1, D] in float32 → [T, H, D]; a head's halves are the pairs.

    A rotation of the head's elements by D/2 brings every element its partner.
    """
    wide = x.float()
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates like ``rope``, but neighbours are the pairs."""
    wide = x.float()
    partners = torch.unflatten(wide, -1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(wide * cos, partners, sin).to(x.dtype)
