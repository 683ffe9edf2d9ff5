"""The four buffers of Tokens, Deltas and StepResult, and which part of them belongs to which row.

A message carries the tokens of many rows, and only those rows have logprobs that asked for them,
each its own number; TokenRow says how a row counts what it has.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np

from shared.codec import Array
from shared.errors import CodecError

_NO_INTS = np.zeros(0, np.int32)
_NO_FLOATS = np.zeros(0, np.float32)


class Counts(Protocol):
    """A TokenRow, a Delta or a ResultRow."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_values(self) -> int: ...

    @property
    def num_top_ids(self) -> int: ...


class TokenArrays(NamedTuple):
    """int32 ids, float32 logprobs, int32 ids of the likeliest tokens, int32 ranks; each [n]."""

    ids: Array = _NO_INTS
    values: Array = _NO_FLOATS
    top_ids: Array = _NO_INTS
    ranks: Array = _NO_INTS

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self)

    def copied(self) -> "TokenArrays":
        """With memory of its own: as views they keep the whole message alive."""
        return TokenArrays(*(array.copy() if len(array) else array for array in self))


class Layout:
    """Where in the buffers of one message the rows lie. Raises CodecError where they do not fit."""

    def __init__(self, rows: Sequence[Counts], arrays: TokenArrays) -> None:
        self.rows = rows
        self._arrays = arrays
        self._token_ends = _ends(row.num_tokens for row in rows)
        ends = [self._token_ends]
        if any(row.num_values for row in rows):
            ends += [
                _ends(row.num_tokens * row.num_values for row in rows),
                _ends(row.num_tokens * row.num_top_ids for row in rows),
                _ends(row.num_tokens if row.num_values else 0 for row in rows),
            ]
        self._ends = ends
        sizes = [each[-1] for each in ends] + [0, 0, 0]
        if any(len(array) != size for array, size in zip(arrays, sizes, strict=False)):
            raise CodecError("the rows count other tokens than the arrays hold")

    def part(self, first: int, last: int) -> TokenArrays:
        """What belongs to the rows ``first`` to ``last`` − 1, as views."""
        return TokenArrays(
            *(
                array[ends[first] : ends[last]]
                for array, ends in zip(self._arrays, self._ends, strict=False)
            )
        )


class Selection:
    """Rows of a Layout for one receiver, in order; copied only where they do not lie together."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._parts: list[TokenArrays] = []
        self._first = self._last = 0

    def add(self, index: int, num_tokens: int | None = None) -> None:
        """Row ``index``, or only its first ``num_tokens`` tokens."""
        row = self._layout.rows[index]
        is_cut = num_tokens is not None and num_tokens < row.num_tokens
        if is_cut or index != self._last:
            self._end_run(index)
        if is_cut:
            part = self._layout.part(index, index + 1)
            self._parts.append(first_tokens(row, part, num_tokens or 0))
            self._first = index + 1
        self._last = index + 1

    def arrays(self) -> TokenArrays:
        self._end_run(self._last)
        return join(self._parts) if self._parts else TokenArrays()

    def _end_run(self, next_first: int) -> None:
        if self._last > self._first:
            self._parts.append(self._layout.part(self._first, self._last))
        self._first = next_first


def bytes_of(row: Counts) -> int:
    """What a row takes in all four buffers."""
    per_token = 1 + row.num_values + row.num_top_ids + (row.num_values > 0)
    return 4 * per_token * row.num_tokens


def join(parts: Sequence[TokenArrays]) -> TokenArrays:
    """One part as it is, several copied into one."""
    if len(parts) == 1:
        return parts[0]
    return TokenArrays(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def first_tokens(row: Counts, part: TokenArrays, num: int) -> TokenArrays:
    """The part of ``row`` that belongs to the first ``num`` of its tokens, as views."""
    return TokenArrays(
        part.ids[:num],
        part.values[: num * row.num_values],
        part.top_ids[: num * row.num_top_ids],
        part.ranks[:num],
    )


def _ends(counts: Iterable[int]) -> list[int]:
    return list(accumulate(counts, initial=0))
