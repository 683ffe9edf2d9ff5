"""Reference of ``pack`` and ``unpack``."""

from collections.abc import Sequence

import torch
from torch import Tensor


def row_of(tensors: Sequence[Tensor], row: int) -> bytes:
    """The bytes of ``row`` of all ``tensors``, one after the other."""
    parts = [each[row].cpu().contiguous().view(torch.uint8).numpy() for each in tensors]
    return b"".join(part.tobytes() for part in parts)
