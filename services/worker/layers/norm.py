"""Root-mean-square norm (arXiv 1910.07467)."""

import torch
from torch import nn

from services.worker.layers.linear import WeightPiece
from services.worker.layers.parallel import Shard, as_shard
from services.worker.layers.weights import empty_parameter


class RMSNorm(nn.Module):
    """[..., size] → [..., size]. A checkpoint has the weight less ``offset``; with an offset the
    weight is float32, so that the sum loses no significant bits. If ranks share a norm, each has
    its part of the weight."""

    def __init__(self, size: int | Shard, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self._shard = as_shard(size)
        self.weight = empty_parameter(self._shard.num, dtype=torch.float32 if offset else None)
        self.eps = eps
        self._offset = offset

    def checkpoint_pieces(self, name: str) -> dict[str, WeightPiece]:
        start, _, total = self._shard
        return {f"{name}.weight": WeightPiece(self.weight, 0, start, total, offset=self._offset)}
