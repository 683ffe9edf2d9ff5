"""Rotary positions (arXiv 2104.09864)."""

import torch
from torch import Tensor, nn

from services.worker.config.frequencies import Rope


class RotaryEmbedding(nn.Module):
    """A table of the rotations of all positions, in float32.

    ``table`` [2, max_positions, size]: cosines, and sines that are negative for the first of each
    pair. A pair has one element from each half of a head's first ``size``, or adjacent elements if
    ``is_interleaved``; the other elements of a head are not rotated.
    """

    table: Tensor

    def __init__(
        self, rope_kind: Rope, size: int, max_positions: int, is_interleaved: bool = False
    ) -> None:
        super().__init__()
        if torch.get_default_device().type == "meta":  # its arithmetic imports a compiler: seconds
            table = torch.empty(2, max_positions, size, dtype=torch.float32)
        else:
            table = _table(rope_kind, size, max_positions, is_interleaved)
        self.register_buffer("table", table, persistent=False)
        self.is_interleaved = is_interleaved

    def forward(self, positions: Tensor) -> Tensor:
        """[T] → [2, T, size]"""
        return self.table.index_select(1, positions)


def _table(rope_kind: Rope, size: int, max_positions: int, is_interleaved: bool) -> Tensor:
    frequencies = rope_kind.frequencies(size, max_positions)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos() * rope_kind.magnitude, angles.sin() * rope_kind.magnitude
    join = _interleave if is_interleaved else _concatenate
    return torch.stack((join(cos, cos), join(-sin, sin)))


def _concatenate(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat((first, second), -1)


def _interleave(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack((first, second), -1).flatten(-2)
