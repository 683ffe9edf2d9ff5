"""Rotary positions (arXiv 2104.09864) of a step."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels.rope import rope, rope_interleaved
from services.worker.config.frequencies import Rope


class Rotation(NamedTuple):
    """The rotations of T positions in float32, computed once a step for all layers."""

    cos: Tensor  # [T, 1, head_dim]
    sin: Tensor  # [T, 1, head_dim], negative for the first of each pair
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]

    def __call__(self, heads: Tensor) -> Tensor:
        """[T, num_heads, head_dim] → the same, rotated."""
        return self.rotate(heads, self.cos, self.sin)


class RotaryEmbedding(nn.Module):
    """positions [T] → their Rotation, from a table.

    The pairs of a head are its halves' elements, or its neighbours if ``is_interleaved``.
    """

    table: Tensor

    def __init__(
        self, rope_kind: Rope, head_dim: int, max_positions: int, is_interleaved: bool = False
    ) -> None:
        super().__init__()
        frequencies = rope_kind.frequencies(head_dim, max_positions)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        cos, sin = angles.cos() * rope_kind.magnitude, angles.sin() * rope_kind.magnitude
        join = _interleave if is_interleaved else _concatenate
        table = torch.stack((join(cos, cos), join(-sin, sin)))
        self.register_buffer("table", table, persistent=False)  # [2, max_positions, head_dim]
        self.is_interleaved = is_interleaved
        self.rotate = rope_interleaved if is_interleaved else rope

    def forward(self, positions: Tensor) -> Rotation:
        cos, sin = self.table.index_select(1, positions).unsqueeze(2)
        return Rotation(cos, sin, self.rotate)


def _concatenate(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat((first, second), -1)


def _interleave(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack((first, second), -1).flatten(-2)
