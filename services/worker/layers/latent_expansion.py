"""The expansion of latents to the keys and values of heads (arXiv 2405.04434)."""

import torch
from torch import Tensor, nn

from services.worker.layers.linear import WeightPiece
from services.worker.layers.parallel import Shard
from services.worker.layers.weights import empty_parameter


class LatentExpansion(nn.Module):
    """Head by head, ``key_dim`` outputs for its keys and ``value_dim`` for its values.

    ``weight`` [H · (key_dim + value_dim), rank] is dense, even if the checkpoint's is quantized: it
    is never multiplied with latents, but its halves with queries and with the heads' outputs.
    """

    def __init__(self, heads: Shard, key_dim: int, value_dim: int, rank: int) -> None:
        super().__init__()
        self._sizes = [key_dim, value_dim]
        self._rows = heads.times(key_dim + value_dim)
        self.weight = empty_parameter(self._rows.num, rank)

    def checkpoint_pieces(self, name: str) -> dict[str, WeightPiece]:
        return {f"{name}.weight": WeightPiece(self.weight, 0, self._rows.start, self._rows.total)}

    def halves(self) -> tuple[Tensor, Tensor]:
        """Views of the weight: [H, key_dim, rank] and [H, value_dim, rank]."""
        by_head = torch.unflatten(self.weight, 0, (-1, sum(self._sizes)))
        keys, values = by_head.split(self._sizes, 1)
        return keys, values
