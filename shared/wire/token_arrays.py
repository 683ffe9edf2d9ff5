"""The four buffers of Tokens, Deltas and StepResult, and their division among rows.

Only rows that asked for logprobs have them, each its own number; the TokenRun of a row has the
counts.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from shared.errors import CodecError
from shared.wire.codec import Array
from shared.wire.messages import NO_TOKENS, Delta, ResultRow, TokenRow, TokenRun

_NO_INTS = np.zeros(0, np.int32)
_NO_FLOATS = np.zeros(0, np.float32)


class TokenArrays(NamedTuple):
    """int32 ids, float32 logprobs, int32 ids of the most likely tokens, int32 ranks; each [n]."""

    ids: Array = _NO_INTS
    values: Array = _NO_FLOATS
    top_ids: Array = _NO_INTS
    ranks: Array = _NO_INTS

    @property
    def num_bytes(self) -> int:
        return self.ids.nbytes + self.values.nbytes + self.top_ids.nbytes + self.ranks.nbytes

    def copied(self) -> "TokenArrays":
        """Returns copies: views keep the whole message alive."""
        return TokenArrays(*(array.copy() if len(array) else array for array in self))


class Layout:
    """The places of each row's tokens in the buffers of one message."""

    def __init__(self, rows: Sequence[ResultRow | TokenRow | Delta], arrays: TokenArrays) -> None:
        """Raises CodecError if the counts of ``rows`` do not match the sizes of ``arrays``."""
        self.runs = runs = [row.run for row in rows]
        self._arrays = arrays
        ends = [_ends(run.num_tokens for run in runs)]
        if any(run.num_values for run in runs):
            ends += [
                _ends(run.num_tokens * run.num_values for run in runs),
                _ends(run.num_tokens * run.num_top_ids for run in runs),
                _ends(run.num_tokens if run.num_values else 0 for run in runs),
            ]
        self._ends = ends
        sizes = [each[-1] for each in ends] + [0, 0, 0]
        if any(len(array) != size for array, size in zip(arrays, sizes, strict=False)):
            raise CodecError("the rows count other tokens than the arrays hold")

    def part(self, first: int, last: int) -> TokenArrays:
        """Returns the buffers of the rows ``first`` to ``last`` − 1, as views."""
        return TokenArrays(
            *(
                array[ends[first] : ends[last]]
                for array, ends in zip(self._arrays, self._ends, strict=False)
            )
        )


class Selection:
    """Rows of a Layout for one receiver, in order, copied only if they are not consecutive."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._parts: list[TokenArrays] = []
        self._first = self._last = 0

    def add(self, index: int, num_tokens: int | None = None) -> None:
        """Adds row ``index``, or only its first ``num_tokens`` tokens."""
        run = self._layout.runs[index]
        is_cut = num_tokens is not None and num_tokens < run.num_tokens
        if is_cut or index != self._last:
            self._take_consecutive(index)
        if is_cut:
            part = self._layout.part(index, index + 1)
            self._parts.append(first_tokens(run, part, num_tokens or 0))
            self._first = index + 1
        self._last = index + 1

    def arrays(self) -> TokenArrays:
        self._take_consecutive(self._last)
        return join(self._parts) if self._parts else TokenArrays()

    def _take_consecutive(self, next_first: int) -> None:
        if self._last > self._first:
            self._parts.append(self._layout.part(self._first, self._last))
        self._first = next_first


def bytes_of(run: TokenRun) -> int:
    """Returns the bytes of a run in all four buffers."""
    per_token = 1 + run.num_values + run.num_top_ids + (run.num_values > 0)
    return 4 * per_token * run.num_tokens


def sum_runs(runs: Sequence[TokenRun]) -> TokenRun:
    """Merges consecutive runs of one kind. The runs with tokens have equal widths."""
    if len(runs) < 2:
        return runs[0] if runs else NO_TOKENS
    first = next((run for run in runs if run.num_tokens), runs[0])
    return replace(
        first,
        num_tokens=sum(run.num_tokens for run in runs),
        num_drafts=sum(run.num_drafts for run in runs),
        num_accepted=sum(run.num_accepted for run in runs),
    )


def join(parts: Sequence[TokenArrays]) -> TokenArrays:
    """Returns a single part unchanged, several parts copied into one."""
    if len(parts) == 1:
        return parts[0]
    return TokenArrays(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def first_tokens(run: TokenRun, part: TokenArrays, num: int) -> TokenArrays:
    """Returns the first ``num`` tokens of ``part``, the arrays of ``run``."""
    return TokenArrays(
        part.ids[:num],
        part.values[: num * run.num_values],
        part.top_ids[: num * run.num_top_ids],
        part.ranks[:num],
    )


def _ends(counts: Iterable[int]) -> list[int]:
    return list(accumulate(counts, initial=0))
