"""Attention without rotary positions."""

import torch
from torch import Tensor

from services.worker.config.frequencies import Rope


class NoRope(Rope, frozen=True, kw_only=True):
    """Nothing turns."""

    rope_theta: float = 2.0

    def frequencies(self, head_dim: int, length: int) -> Tensor:
        return torch.zeros(head_dim // 2)
