"""Decides between loading and computing, by measured times. Pure.

A hit goes on in stores as far as this takes the least time until all its tokens are there: to its
end, to the first block on a disk, or not at all. The time of a load is that of its bytes, by the
median of the worker's last copies, and of the copies that wait for the disk; the time of a prompt
is that of its steps. After ``TRY_EVERY`` shorter hits a whole one is loaded, since times change.
Output that a client has goes on from the saved bytes at any speed: computing again may round in
another way.
"""

from collections import deque
from statistics import median

from prometheus_client import Counter

from services.scheduler.sequence import Sequence
from services.scheduler.stores.disk import DiskCopies
from services.scheduler.stores.hits import StoreHits
from services.scheduler.stores.index import Reach
from services.scheduler.worker_state import WorkerState

MIN_LOADED = 2
"""Blocks worth a load: the sequence waits for two plans."""
NUM_TIMES = 16
MIN_TIMES = 4  # fewer are no measurement
TRY_EVERY = 16  # chosen

DECLINED_TOKENS = Counter(
    "shoal_kv_store_declined_tokens",
    "Tokens of hits in stores that were computed, since loading would take longer",
)


class CopyTimes:
    """Of the last copies from one medium; ``byte_s`` is 0 before there are enough."""

    def __init__(self) -> None:
        self.byte_s = 0.0
        self._times: deque[float] = deque(maxlen=NUM_TIMES)

    def note(self, num_bytes: int, time_s: float) -> None:
        """A time of 0 is none: the worker did not measure."""
        if num_bytes and time_s:
            self._times.append(time_s / num_bytes)
            if len(self._times) >= MIN_TIMES:
                self.byte_s = median(self._times)


class LoadChoice:
    """Of sequences of ``worker``, which finds ``hits`` in ``reach``."""

    def __init__(self, worker: WorkerState, reach: Reach, hits: StoreHits) -> None:
        self.memory, self.on_disk = CopyTimes(), CopyTimes()
        self.disk: DiskCopies | None = None
        self._share, self._size = worker.stream_share, worker.capacity.block_size
        self._reach, self._hits = reach, hits
        self._memory_hits = StoreHits(worker, Reach(reach.memory))
        self._num_declined = 0

    def find_end(self, sequence: Sequence, first: int, *, loads_states: bool) -> int:
        """The number of blocks to begin with; the ``first`` ones are in the cache."""
        return self._ends(sequence, first, loads_states)[0]

    def choose(self, sequence: Sequence, first: int, *, loads_states: bool) -> int:
        """As ``find_end``, for a sequence that begins now."""
        end, longest = self._ends(sequence, first, loads_states)
        if end < longest:
            self._num_declined += 1
            DECLINED_TOKENS.inc((longest - end) * self._size)
        elif self._num_declined >= TRY_EVERY and end > first:
            self._num_declined = 0
        return end

    def _ends(self, sequence: Sequence, first: int, loads_states: bool) -> tuple[int, int]:
        """The chosen end, and the one of the longest hit."""
        if sequence.num_worker_deaths > 1:
            return first, first
        longest = self._end_of(self._hits, sequence, first, loads_states)
        has_output = sequence.has_run or sequence.attempt > 1
        if longest == first or has_output or self._num_declined >= TRY_EVERY:
            return longest, longest
        if not self._computing_s(first, longest) or not self._is_measured:
            return longest, longest
        ends = [longest, first]
        if self.disk is not None:
            ends.insert(1, self._end_of(self._memory_hits, sequence, first, loads_states))
        times_s = {
            end: self._loading_s(sequence, first, end) + self._computing_s(end, longest)
            for end in ends
        }
        return min(ends, key=lambda end: times_s[end]), longest

    def _end_of(self, hits: StoreHits, sequence: Sequence, first: int, loads_states: bool) -> int:
        end = hits.find_end(sequence, first, loads_states=loads_states)
        return end if end - first >= MIN_LOADED else first

    @property
    def _is_measured(self) -> bool:
        return self.memory.byte_s > 0 or self.on_disk.byte_s > 0

    def _computing_s(self, first: int, end: int) -> float:
        """Of the blocks from ``first`` to ``end``; 0 if unknown."""
        num = (end - first) * self._size
        return self._share.alone_s(num, 2 * first * self._size + num)

    def _loading_s(self, sequence: Sequence, first: int, end: int) -> float:
        in_memory = on_disk = 0
        if end > first:
            for key in self._hits.missing_keys(sequence, first, end):
                if (found := self._reach.find(key)) is not None:
                    in_memory += found.places.place_bytes
                    on_disk += found.places.place_bytes if found.is_on_disk else 0
        if on_disk and self.disk is not None:
            on_disk += self.disk.num_bytes_ahead
        return in_memory * self.memory.byte_s + on_disk * self.on_disk.byte_s
