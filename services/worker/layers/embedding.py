"""Token embedding and the output head."""

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from services.worker.layers.linear import empty_parameter


class Embedding(nn.Module):
    """ids [T] → [T, hidden_size]"""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size)

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight)


class LMHead(nn.Module):
    """[S, hidden_size] → logits [S, vocab_size], accumulated and stored in float32.

    bfloat16 logits tie too often, so the weight is float32 whatever the model's dtype is.
    ``source`` is the tensor in the checkpoint that fills it: tied heads copy the embedding's.
    """

    def __init__(self, vocab_size: int, hidden_size: int, source: str) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size, dtype=torch.float32)
        self.source = source

    def share(self, embedding_weight: nn.Parameter) -> None:
        """Is the embedding itself if that is float32 too."""
        if embedding_weight.dtype == self.weight.dtype:
            self.weight = embedding_weight

    def checkpoint_pieces(self) -> dict[str, Tensor]:
        return {self.source: self.weight}

    def forward(self, x: Tensor) -> Tensor:
        return linear(x.float(), self.weight)
