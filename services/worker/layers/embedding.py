"""Token embedding and the output head; each rank has the rows of some tokens."""

import torch
from torch import Tensor, nn

from kernels.grammar_mask import HIDDEN
from services.worker.layers.linear import WeightPiece
from services.worker.layers.parallel import Shard, as_shard
from services.worker.layers.weights import Dense, Quantized, Weight


class TokenRows(nn.Module):
    """Has a weight with a row of ``hidden_size`` numbers for each token, which is dense and on no
    device until it is filled. ``source`` is the tensor in the checkpoint that fills it."""

    def __init__(
        self, vocab: int | Shard, hidden_size: int, source: str, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.vocab = as_shard(vocab)
        self.inputs, self.outputs, self.sizes = hidden_size, self.vocab.num, [self.vocab.num]
        self.weight: Weight = Dense(self.outputs, hidden_size, dtype, "meta")
        self._source = source

    def allocate(self, device: torch.device) -> None:
        """Gives the weight uninitialized memory of its own."""
        self.weight = Dense(self.outputs, self.inputs, self.weight.values.dtype, device)

    def leave(self) -> None:
        """Has no rows from now on: they are in another process."""
        self.weight = Dense(0, self.inputs, self.weight.values.dtype, "meta")

    @property
    def is_here(self) -> bool:
        """False if its rows are left to another process."""
        return isinstance(self.weight, Quantized) or len(self.weight.values) == self.outputs

    def checkpoint_pieces(self, name: str) -> dict[str, WeightPiece]:
        return {
            self._source: WeightPiece(self.weight.values, 0, self.vocab.start, self.vocab.total)
        }


class Embedding(TokenRows):
    """ids [T] → [T, hidden_size]"""


class LMHead(TokenRows):
    """[S, hidden_size] → logits [S, vocab_size], accumulated and stored in float32: bfloat16 logits
    tie too often.

    A CPU's GEMMs round to their operands' dtype, so there the weight is always float32; elsewhere
    it has the model's dtype, because each step would read a copy twice as wide. A head that is
    ``tied`` is made from the embedding's tensor, and shares its weight if possible.
    """

    def __init__(
        self, vocab: int | Shard, hidden_size: int, source: str, tied: Embedding | None = None
    ) -> None:
        is_on_cpu = torch.get_default_device().type == "cpu"
        super().__init__(vocab, hidden_size, source, torch.float32 if is_on_cpu else None)
        if tied is not None and self.can_have(tied.weight):
            self.weight = tied.weight

    def can_have(self, weight: Weight) -> bool:
        """True if ``weight`` is in codes, or has all rows in the dtype."""
        if isinstance(weight, Quantized):
            return True
        is_whole = len(weight.values) == self.outputs
        return is_whole and weight.values.dtype == self.weight.values.dtype

    def spread(self, logits: Tensor, states: Tensor) -> Tensor:
        """logits [S, N] of ``states`` [S, hidden_size], of the N tokens that it has → [S,
        vocab_size]: here all have theirs."""
        return logits


class DraftLMHead(LMHead):
    """Has the rows of some tokens alone, ``ids`` [N] int64 of ``vocab_size``: logits [S, N]. A rank
    has its share of them, ``vocab``, in ``weight``."""

    def __init__(
        self, vocab: Shard, hidden_size: int, ids: Tensor, vocab_size: int, weight: Weight
    ) -> None:
        super().__init__(vocab, hidden_size, source="")
        self.ids: Tensor
        self.register_buffer("ids", ids)
        self.weight = weight
        self._vocab_size = vocab_size

    def spread(self, logits: Tensor, states: Tensor) -> Tensor:
        """logits [S, N] → [S, vocab_size]; −inf for tokens that it does not have."""
        of_all = logits.new_full((len(logits), self._vocab_size), HIDDEN)
        return of_all.scatter_(1, self.ids.expand_as(logits), logits)
