"""How often each id occurs in a list that grows, without looking through it again."""

from copy import copy

import numpy as np


class SeenIds:
    """Counts the distinct ids of a list that begins with ``ids`` [n] int32."""

    def __init__(self, ids: np.ndarray) -> None:
        distinct, counts = np.unique(ids, return_counts=True)
        self._num = len(distinct)
        self._ids = np.zeros(2 * self._num + 16, np.int64)
        self._counts = np.zeros_like(self._ids)
        self._ids[: self._num], self._counts[: self._num] = distinct, counts
        self._indices = {token_id: index for index, token_id in enumerate(distinct.tolist())}

    @property
    def ids(self) -> np.ndarray:
        """[n] int64, each once; a view that ``add`` changes."""
        return self._ids[: self._num]

    @property
    def counts(self) -> np.ndarray:
        """[n] int64, of ``ids``; a view that ``add`` changes."""
        return self._counts[: self._num]

    def with_more(self, ids: np.ndarray) -> "SeenIds":
        """Of the list with ``ids`` [n] at its end, which itself stays as it is."""
        if not len(ids):
            return self
        other = copy(self)
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        other._indices = self._indices.copy()
        for token_id in ids.tolist():
            other.add(token_id)
        return other

    def add(self, token_id: int) -> None:
        index = self._indices.setdefault(token_id, self._num)
        if index == self._num:
            self._num += 1
            if self._num > len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[index] = token_id
        self._counts[index] += 1
