"""Rotary positions (arXiv 2104.09864): each pair of a head's elements is rotated by its own angle.

``sin`` is negated for the first element of a pair, so that an element needs only its partner: three
operations on every device.
"""

import torch
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D], cos and sin [T, 1, D] float32 → [T, H, D]; pairs are elements of the two halves.

    Rotating the head's elements by D/2 gives every element its partner.
    """
    wide = x.float()
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same as ``rope``, with neighbours as pairs."""
    wide = x.float()
    partners = torch.unflatten(wide, -1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(wide * cos, partners, sin).to(x.dtype)
