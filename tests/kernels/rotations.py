"""Tables of rotary positions for tests."""

import torch
from torch import Tensor


def rotation_table(num_positions: int, head_dim: int, is_interleaved: bool) -> Tensor:
    """Cosines and signed sines of random angles: [2, num_positions, head_dim] float32."""
    angles = torch.randn(num_positions, head_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    pairs = torch.stack((torch.stack((cos, cos), -1), torch.stack((-sin, sin), -1)))
    return (pairs if is_interleaved else pairs.transpose(-1, -2)).flatten(-2)
