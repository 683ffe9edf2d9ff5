"""A step's tokens with adapters, sorted by adapter."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class Layout(NamedTuple):
    """``tokens`` [n] of ``num_tokens``: those of ``adapters[i]`` [S] from ``starts[i]`` [S + 1] on.
    All are int64."""

    num_tokens: int
    tokens: np.ndarray
    adapters: np.ndarray
    starts: np.ndarray

    def segments(self) -> Iterator[tuple[int, np.ndarray]]:
        """Each adapter with its tokens."""
        ends = self.starts.tolist()
        for index, start, end in zip(self.adapters.tolist(), ends, ends[1:], strict=False):
            yield index, self.tokens[start:end]


def lay_out(adapters: np.ndarray) -> Layout:
    """``adapters`` [T] int64: the index of each token's adapter, or −1."""
    tokens = np.flatnonzero(adapters >= 0)
    order = np.argsort(adapters[tokens], kind="stable")
    tokens = tokens[order]
    indices, starts = np.unique(adapters[tokens], return_index=True)
    return Layout(len(adapters), tokens, indices, np.append(starts, len(tokens)))
