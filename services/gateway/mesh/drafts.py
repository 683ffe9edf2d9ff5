"""Drafts verified for a choice, with their drafter's logprobs."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from shared.wire.codec import Array
from shared.wire.messages import Delta
from shared.wire.token_arrays import TokenArrays, join


@dataclass(frozen=True, slots=True)
class Drafts:
    """``arrays`` as they came: the only value of a draft is the logprob its drafter gave it.

    ``positions`` [n] int32 count the tokens of the choice before the one that a draft was for;
    ``are_accepted`` [n] bool.
    """

    arrays: TokenArrays
    positions: Array
    are_accepted: Array

    @property
    def num(self) -> int:
        return len(self.positions)


NO_DRAFTS = Drafts(TokenArrays(), np.zeros(0, np.int32), np.zeros(0, np.bool_))


def drafts_of(row: Delta, part: TokenArrays) -> Drafts:
    """Returns the drafts of a row."""
    numbers = np.arange(row.run.num_tokens, dtype=np.int32)
    return Drafts(part.copied(), row.position + numbers, numbers < row.run.num_accepted)


def joined(several: Iterable[Drafts]) -> Drafts:
    """Returns all in order; most requests have none."""
    some = [each for each in several if each.num]
    if not some:
        return NO_DRAFTS
    return Drafts(
        join([each.arrays for each in some]),
        np.concatenate([each.positions for each in some]),
        np.concatenate([each.are_accepted for each in some]),
    )
