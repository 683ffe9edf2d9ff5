"""The outcome of ``accept`` for each row, packed for the host."""

from typing import NamedTuple

from torch import Tensor

# Outcome codes of a row: it continues, its output ended, it has no room left, it is recomputed
# without drafts (non-finite logits or a grammar not compiled yet), or its slot was closed before.
# REPEATED is set by the host later. A negative code is the error of the first token.
RUNS, STOPPED, FULL, RETRIED, CLOSED, REPEATED = 0, 1, 2, 3, 4, 5

NUM_EMITTED, NUM_ACCEPTED, CODE, NUM_VALID, TOKENS = range(5)  # columns of ``AcceptOutput.packed``


class AcceptOutput(NamedTuple):
    """R rows with up to w tokens each; all int32. ``packed`` reaches the host in one copy."""

    num_emitted: Tensor  # [R]: number of leading tokens that are emitted
    packed: Tensor  # [R, 4 + w + w - 1]: the columns above, tokens (0 if invalid), drafts

    @property
    def num_accepted(self) -> Tensor:
        """[R]: number of leading drafts that are accepted and emitted."""
        return self.packed[:, NUM_ACCEPTED]

    @property
    def codes(self) -> Tensor:
        """[R]"""
        return self.packed[:, CODE]

    @property
    def drafts(self) -> Tensor:
        """[R, w - 1]: the verified drafts."""
        width = (self.packed.shape[1] - TOKENS + 1) // 2
        return self.packed[:, TOKENS + width :]
