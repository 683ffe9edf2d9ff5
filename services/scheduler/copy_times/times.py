"""Times of copies, and the choice between them and computing. Pure.

A prefix is copied up to the end that takes the least time until all its tokens are there. After
``TRY_EVERY`` shorter copies a whole one is made, since times change. Sequences with output always
copy: computing again may round in another way.
"""

from collections import deque
from collections.abc import Callable, Iterable
from statistics import median

from services.scheduler.sequence import Sequence
from services.scheduler.worker_state import WorkerState

NUM_TIMES = 16
MIN_TIMES = 4  # fewer are no measurement
TRY_EVERY = 16  # chosen


class CopyTimes:
    """The times of the last copies from one place; ``byte_s`` is 0 before there are enough."""

    def __init__(self) -> None:
        self.byte_s = 0.0
        self._times: deque[float] = deque(maxlen=NUM_TIMES)

    def note(self, num_bytes: int, time_s: float) -> None:
        """A time of 0 is none: it was not measured."""
        if num_bytes and time_s:
            self._times.append(time_s / num_bytes)
            if len(self._times) >= MIN_TIMES:
                self.byte_s = median(self._times)


class CopyOrCompute:
    """Chooses the number of blocks with which sequences of ``worker`` begin; the ``first`` ones are
    in its cache."""

    def __init__(self, worker: WorkerState) -> None:
        self._share, self._size = worker.stream_share, worker.capacity.block_size
        self._num_declined = 0

    def takes_all(self, sequence: Sequence, first: int, longest: int) -> bool:
        """True if the ``longest`` copy is made without a choice."""
        has_output = sequence.has_run or sequence.attempt > 1
        is_due = self._num_declined >= TRY_EVERY
        return has_output or is_due or not self.computing_s(first, longest)

    def quickest(self, ends: Iterable[int], longest: int, copying_s: Callable[[int], float]) -> int:
        """The first of the quickest ``ends``; ``copying_s`` is the time up to an end."""
        return min(ends, key=lambda end: copying_s(end) + self.computing_s(end, longest))

    def note(self, first: int, end: int, longest: int) -> int:
        """A sequence begins after ``end`` blocks. Returns the tokens that it computes instead."""
        if end < longest:
            self._num_declined += 1
        elif self._num_declined >= TRY_EVERY and end > first:
            self._num_declined = 0
        return (longest - end) * self._size

    def computing_s(self, first: int, end: int) -> float:
        """Of the blocks from ``first`` to ``end``; 0 if unknown."""
        num = (end - first) * self._size
        return self._share.alone_s(num, 2 * first * self._size + num)
