"""The outcome of ``accept`` for each row, and how it is packed for the host."""

from typing import NamedTuple

from torch import Tensor

# What becomes of a row: it runs on, its text ended, there is no room for more, its numbers were not
# finite or its grammar not compiled and it is computed again without drafts, or its slot was closed
# before; or, as the host finds afterwards, its text repeats itself. Below 0: what is wrong with its
# first token.
RUNS, STOPPED, FULL, RETRIED, CLOSED, REPEATED = 0, 1, 2, 3, 4, 5

NUM_EMITTED, NUM_ACCEPTED, CODE, NUM_VALID, TOKENS = range(5)  # columns of what is packed


class AcceptOutput(NamedTuple):
    """R rows with up to w tokens each; all int32. ``packed`` is for the host, in one copy."""

    num_emitted: Tensor  # [R]: the first of the tokens
    packed: Tensor  # [R, 4 + w + w - 1]: the columns above, tokens (0: none), drafts

    @property
    def num_accepted(self) -> Tensor:
        """[R]: the first of the drafts, which are emitted."""
        return self.packed[:, NUM_ACCEPTED]

    @property
    def codes(self) -> Tensor:
        """[R]"""
        return self.packed[:, CODE]

    @property
    def drafts(self) -> Tensor:
        """[R, w - 1]: what was verified."""
        width = (self.packed.shape[1] - TOKENS + 1) // 2
        return self.packed[:, TOKENS + width :]
