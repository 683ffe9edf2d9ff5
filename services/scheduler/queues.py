"""Sequences without a slot, in the order in which they shall get one."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import chain

from services.scheduler.sequence import Sequence


class WaitingQueue:
    """Keeps sequences sorted by ``order``, which never changes while one waits."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterates over a copy: sequences may leave meanwhile."""
        return iter(self._sequences[:])

    def first_where(self, condition: Callable[[Sequence], bool]) -> Sequence | None:
        return next(filter(condition, self._sequences), None)

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_order)

    def try_remove(self, sequence: Sequence) -> bool:
        """Returns False where the sequence does not wait here."""
        index = bisect_left(self._sequences, sequence.order, key=_order)
        is_here = index < len(self) and self._sequences[index] is sequence
        if is_here:
            del self._sequences[index]
        return is_here


class Queues:
    """Holds every sequence without a slot in the one queue that its state calls for.

    ``paused``: it has no credit, so it is not computed; ``isolated``: a worker died under it, so it
    is computed alone; ``waiting``: all others.
    """

    def __init__(self) -> None:
        self.waiting = WaitingQueue()
        self.isolated = WaitingQueue()
        self.paused = WaitingQueue()

    def __len__(self) -> int:
        return len(self.waiting) + len(self.isolated) + len(self.paused)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self.waiting, self.isolated, self.paused)

    @property
    def num_runnable(self) -> int:
        """How many would be computed if they had a slot."""
        return len(self.waiting) + len(self.isolated)

    def put(self, sequence: Sequence) -> None:
        if not sequence.has_credit:
            self.paused.add(sequence)
        elif sequence.is_isolated:
            self.isolated.add(sequence)
        else:
            self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        for queue in (self.waiting, self.isolated, self.paused):
            if queue.try_remove(sequence):
                return

    def resume(self, sequence: Sequence) -> None:
        """Moves a paused sequence that has credit again to the queue where it is computed from."""
        if sequence.has_credit and self.paused.try_remove(sequence):
            self.put(sequence)


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.order
