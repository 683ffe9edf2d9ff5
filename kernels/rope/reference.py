"""Reference of ``rope`` and ``rope_interleaved``."""

import torch
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x[i], x[i + D/2]) by their angles, in float32."""
    half = x.shape[-1] // 2
    first, second = x.float().chunk(2, -1)
    cos, sin = cos[..., half:], sin[..., half:]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return rotated.to(x.dtype)


def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x[2i], x[2i + 1]) by their angles, in float32."""
    first, second = x.float()[..., ::2], x.float()[..., 1::2]
    cos, sin = cos[..., 1::2], sin[..., 1::2]
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), -1)
    return rotated.flatten(-2).to(x.dtype)
