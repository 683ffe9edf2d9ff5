"""Decides between loading and computing, by measured times. Pure.

A hit goes on in stores as far as this is quicker (``copy_times``): to its end, to the first block
on a disk, or not at all. The time of a load is that of its bytes, by the worker's last copies, and
of the copies that wait for the disk; the time of a prompt is that of its steps.
"""

from prometheus_client import Counter

from services.scheduler.copy_times.times import CopyOrCompute, CopyTimes
from services.scheduler.sequence import Sequence
from services.scheduler.stores.disk import DiskCopies
from services.scheduler.stores.hits import StoreHits
from services.scheduler.stores.index import Reach
from services.scheduler.worker_state import WorkerState

MIN_LOADED = 2
"""Blocks worth a load: the sequence waits for two plans."""

DECLINED_TOKENS = Counter(
    "shoal_kv_store_declined_tokens",
    "Tokens of hits in stores that were computed, since loading would take longer",
)


class LoadChoice:
    """Of sequences of ``worker``, which finds ``hits`` in ``reach``."""

    def __init__(self, worker: WorkerState, reach: Reach, hits: StoreHits) -> None:
        self.memory, self.on_disk = CopyTimes(), CopyTimes()
        self.disk: DiskCopies | None = None
        self._reach, self._hits = reach, hits
        self._memory_hits = StoreHits(worker, Reach(reach.memory))
        self._choice = CopyOrCompute(worker)

    def find_end(self, sequence: Sequence, first: int, *, loads_states: bool) -> int:
        """The number of blocks to begin with; the ``first`` ones are in the cache."""
        return self._ends(sequence, first, loads_states)[0]

    def choose(self, sequence: Sequence, first: int, *, loads_states: bool) -> int:
        """As ``find_end``, for a sequence that begins now."""
        end, longest = self._ends(sequence, first, loads_states)
        DECLINED_TOKENS.inc(self._choice.note(first, end, longest))
        return end

    def _ends(self, sequence: Sequence, first: int, loads_states: bool) -> tuple[int, int]:
        """The chosen end, and the one of the longest hit."""
        if sequence.num_worker_deaths > 1:
            return first, first
        longest = self._end_of(self._hits, sequence, first, loads_states)
        if longest == first or not self._is_measured:
            return longest, longest
        if self._choice.takes_all(sequence, first, longest):
            return longest, longest
        ends = [longest, first]
        if self.disk is not None:
            ends.insert(1, self._end_of(self._memory_hits, sequence, first, loads_states))
        end = self._choice.quickest(
            ends, longest, lambda end: self._loading_s(sequence, first, end)
        )
        return end, longest

    def _end_of(self, hits: StoreHits, sequence: Sequence, first: int, loads_states: bool) -> int:
        end = hits.find_end(sequence, first, loads_states=loads_states)
        return end if end - first >= MIN_LOADED else first

    @property
    def _is_measured(self) -> bool:
        return self.memory.byte_s > 0 or self.on_disk.byte_s > 0

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
