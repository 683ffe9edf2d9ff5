"""Token embedding and the output head, which are whole on every rank."""

import torch
from torch import nn

from services.worker.layers.linear import Piece
from services.worker.layers.weights import Dense, empty_parameter


class Embedding(nn.Module):
    """ids [T] → [T, hidden_size]"""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size)


class LMHead(nn.Module):
    """[S, hidden_size] → logits [S, vocab_size], accumulated and stored in float32: bfloat16 logits
    tie too often.

    A CPU's products round to their operands' dtype, so there the weight is float32 whatever the
    model's is; elsewhere it has the model's, as a copy twice as wide would be read in every step.
    ``source`` is the tensor in the checkpoint that fills it: a head that is ``tied`` copies the
    embedding's, or is the embedding itself where that has the same dtype.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, source: str, tied: Embedding | None = None
    ) -> None:
        super().__init__()
        dtype = torch.float32 if torch.get_default_device().type == "cpu" else None
        self.inputs, self.outputs = hidden_size, vocab_size
        self.weight = Dense(vocab_size, hidden_size, dtype)
        if tied is not None and tied.weight.dtype == self.weight.values.dtype:
            self.weight.values = tied.weight
        self._source = source

    def checkpoint_pieces(self, name: str) -> dict[str, Piece]:
        return {self._source: Piece(self.weight.values)}
