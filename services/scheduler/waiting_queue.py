"""Sequences that wait, in the order in which they run."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from services.scheduler.sequence import Sequence


class WaitingQueue:
    """Sorted by ``order``, which never changes while somebody waits."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Over a copy: sequences may leave meanwhile."""
        return iter(self._sequences[:])

    def first_where(self, condition: Callable[[Sequence], bool]) -> Sequence | None:
        return next(filter(condition, self._sequences), None)

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_order)

    def try_remove(self, sequence: Sequence) -> bool:
        """False where it does not wait here."""
        index = bisect_left(self._sequences, sequence.order, key=_order)
        is_here = index < len(self) and self._sequences[index] is sequence
        if is_here:
            del self._sequences[index]
        return is_here


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.order
