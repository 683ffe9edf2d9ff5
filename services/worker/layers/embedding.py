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
    """[S, hidden_size] → logits [S, vocab_size], accumulated and stored in float32: bfloat16 logits
    tie too often.

    A CPU's products round to their operands' dtype, so there the weight is float32 whatever the
    model's is; elsewhere it has the model's, as a copy twice as wide would be read in every step.
    ``source`` is the tensor in the checkpoint that fills it: tied heads copy the embedding's.
    """

    def __init__(self, vocab_size: int, hidden_size: int, source: str) -> None:
        super().__init__()
        dtype = torch.float32 if torch.get_default_device().type == "cpu" else None
        self.weight = empty_parameter(vocab_size, hidden_size, dtype=dtype)
        self.source = source

    def share(self, embedding_weight: nn.Parameter) -> None:
        """Is the embedding itself if that has the same dtype."""
        if embedding_weight.dtype == self.weight.dtype:
            self.weight = embedding_weight

    def checkpoint_pieces(self) -> dict[str, Tensor]:
        return {self.source: self.weight}

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dtype == torch.float32:
            return linear(x.float(), self.weight)
        return torch.mm(x, self.weight.t(), out_dtype=torch.float32)
