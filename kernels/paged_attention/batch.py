"""The rows of a step and their blocks, prepared on the host."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

# Decode rows share one attention call over a gathered copy of their blocks. A copy has at most this
# many positions, which bounds its memory. A longer row is alone.
MAX_GATHERED_TOKENS = 64 * 1024


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of one attention call: several with one token each, or one with many."""

    start: int  # their tokens in the step
    end: int
    num_rows: int
    num_keys: int  # of the last row, the longest
    blocks: Tensor  # [num_rows * max_blocks] int64
    mask: Tensor | None  # added to scores: [num_rows, 1, 1, num_keys] or [num_tokens, num_keys]

    @property
    def is_causal(self) -> bool:
        """True for one row without keys before its tokens: a causal mask suffices."""
        num_tokens = self.end - self.start
        return self.mask is None and self.num_rows == 1 < self.num_keys == num_tokens


@dataclass(frozen=True)
class AttentionBatch:
    """R rows with T tokens; those with one token come first, shorter rows before longer ones."""

    token_starts: np.ndarray  # [R + 1] int64
    num_keys: np.ndarray  # [R] int64, the row's own tokens of this step included
    block_tables: np.ndarray  # [R, max_blocks] int64
    block_size: int
    dtype: torch.dtype
    device: torch.device
    # [R] int64: earlier keys are hidden; None: no key is hidden.
    first_keys: np.ndarray | None = None
    # [T] int64, not descending in a row: a token sees the keys before it, at least up to its own.
    # None: no token sees a later one.
    ends: np.ndarray | None = None
    _groups: dict[int | None, list[Group]] = field(  # by window
        default_factory=dict, init=False, repr=False, compare=False
    )
    _masks: dict[tuple[int, int | None], Tensor | None] = field(  # by first row and window
        default_factory=dict, repr=False, compare=False
    )

    def with_tables(self, block_tables: np.ndarray) -> "AttentionBatch":
        """The same rows in layers with other ``block_tables``."""
        return replace(self, block_tables=block_tables)

    @cached_property
    def causal(self) -> "AttentionBatch":
        """The same rows without ``ends``."""
        return self if self.ends is None else replace(self, ends=None, _masks={})

    def groups(self, window: int | None = None) -> list[Group]:
        """The calls of torch's attention, computed once a step for each ``window``. A token sees
        the last ``window`` keys, its own included, or all of them."""
        if window not in self._groups:
            num_blocks = -(-self.num_keys // self.block_size)
            bounds = _group_bounds(np.diff(self.token_starts), num_blocks, self.block_size)
            groups = [self._group(first, last, num_blocks, window) for first, last in bounds]
            self._groups[window] = groups
        return self._groups[window]

    def _group(self, first: int, last: int, num_blocks: np.ndarray, window: int | None) -> Group:
        start, end = self.token_starts[[first, last]].tolist()
        blocks = self.block_tables[first:last, : num_blocks[last - 1]]
        return Group(
            start,
            end,
            last - first,
            int(self.num_keys[last - 1]),
            torch.from_numpy(blocks.ravel()).to(self.device, non_blocking=True),
            self._mask(first, last, end - start, window),
        )

    def _mask(self, first: int, last: int, num_tokens: int, window: int | None) -> Tensor | None:
        if (first, window) not in self._masks:
            hidden = self._hidden(first, last, num_tokens, window)
            mask = None
            if hidden is not None:
                scores = torch.zeros(hidden.shape, dtype=self.dtype)
                mask = scores.masked_fill_(torch.from_numpy(hidden), float("-inf"))
                mask = mask.to(self.device, non_blocking=True)
            self._masks[first, window] = mask
        return self._masks[first, window]

    def _hidden(
        self, first: int, last: int, num_tokens: int, window: int | None
    ) -> np.ndarray | None:
        """True where a token does not see a key; None if every token sees every key or the mask is
        causal."""
        num_keys = self.num_keys[first:last]
        longest = num_keys[-1]
        is_windowed = window is not None and window < longest
        if num_tokens == last - first:
            is_needed = num_keys[0] < longest
            own = (num_keys - 1).reshape(-1, 1, 1, 1)
        else:
            is_needed = num_tokens < longest
            own = np.arange(longest - num_tokens, longest)[:, None]
        if self.first_keys is None and self.ends is None and not is_needed and not is_windowed:
            return None
        keys, seen = np.arange(longest), own
        if self.ends is not None:
            start = self.token_starts[first]
            ends = self.ends[start : start + num_tokens].reshape(own.shape)
            seen = np.maximum(own, ends - 1)
        is_hidden: np.ndarray = keys > seen
        if is_windowed:
            is_hidden |= keys <= own - window
        if self.first_keys is not None:
            shape = (-1, 1) if own.ndim == 2 else own.shape
            is_hidden |= keys < self.first_keys[first:last].reshape(shape)
        return is_hidden


def prepare_attention(
    num_tokens: np.ndarray,
    num_keys: np.ndarray,
    block_tables: np.ndarray,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    first_keys: np.ndarray | None = None,
) -> AttentionBatch:
    """``num_tokens``, ``num_keys`` and ``first_keys`` [R], ``block_tables`` [R, max_blocks] int64,
    in row order."""
    starts = np.concatenate([[0], np.cumsum(num_tokens)])
    return AttentionBatch(starts, num_keys, block_tables, block_size, dtype, device, first_keys)


def _group_bounds(
    num_tokens: np.ndarray, num_blocks: np.ndarray, block_size: int
) -> Iterator[tuple[int, int]]:
    """Ranges of rows that share a call: rows of one token, unless padding would more than double
    the shortest."""
    first = 0
    num_rows = len(num_tokens)
    for row in range(1, num_rows):
        gathered = (row + 1 - first) * int(num_blocks[row]) * block_size
        is_wide = num_tokens[row] > 1 or num_tokens[first] > 1
        is_long = num_blocks[row] > 2 * num_blocks[first] or gathered > MAX_GATHERED_TOKENS
        if is_wide or is_long:
            yield first, row
            first = row
    if num_rows:
        yield first, num_rows
