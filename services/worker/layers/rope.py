"""Rotary positions (arXiv 2104.09864), in the layout where the halves of a head are the pairs."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Rotation(NamedTuple):
    """The rotations of T positions in float32, computed once a step for all layers."""

    cos: Tensor  # [T, 1, head_dim]
    sin: Tensor  # [T, 1, head_dim], negative in the first half


class RotaryEmbedding(nn.Module):
    """positions [T] → their Rotation, from a table."""

    table: Tensor

    def __init__(self, head_dim: int, max_positions: int, base: float) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), base**-exponents)
        cos, sin = angles.cos(), angles.sin()
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))
        self.register_buffer("table", table, persistent=False)  # [2, max_positions, head_dim]

    def forward(self, positions: Tensor) -> Rotation:
        cos, sin = self.table.index_select(1, positions).unsqueeze(2)
        return Rotation(cos, sin)
