"""The places where sequences may begin with the blocks and states of stores. Pure.

The rule is the one of the cache (``kv_blocks.py``): layers without a window need all blocks before
a place, layers with a window the last ones, from ``num_passed`` on, and layers with a state need
theirs.
"""

from collections.abc import Iterator

from services.scheduler.sequence import Sequence
from services.scheduler.stores.index import Reach, group_key, state_key
from services.scheduler.worker_state import WorkerState
from shared.wire.kv_groups import copy_interval, num_passed


class StoreHits:
    """Of sequences of ``worker``, which reads the stores in ``reach``. Its groups of layers with
    ``windows`` have their numbers; only the first group can be without one: ``has_whole``."""

    def __init__(self, worker: WorkerState, reach: Reach) -> None:
        groups, self._size = worker.capacity.groups, worker.capacity.block_size
        self.has_whole = groups[0].window is None
        self.windows = [(number, each) for number, each in enumerate(groups) if each.window]
        self._reach = reach
        self._pool, self._find = worker.pool, worker.index.find
        self._has_states = worker.blocks.has_states
        self._between = copy_interval(self._size) // self._size  # blocks between two states

    def find_end(self, sequence: Sequence, first: int, *, loads_states: bool) -> int:
        """The most blocks with which it may begin. The cache has the ``first`` ones, as far as they
        are needed."""
        end = sequence.max_cached // self._size
        if self.has_whole:
            end = self._end_of_whole(sequence, first, end)
        while end > first:
            most = self._most_with_rest(sequence, first, end, loads_states)
            if most == end:
                return end
            end = most
        return first

    def last_keys(self, sequence: Sequence, end: int) -> Iterator[bytes]:
        """Of the blocks of windows, or of the state, after ``end`` blocks."""
        for number, group in self.windows:
            for block in range(num_passed(group, end * self._size, self._size), end):
                yield group_key(sequence.block_hash(block, self._size), number)
        if self._has_states and end:
            yield state_key(sequence.block_hash(end - 1, self._size))

    def missing_keys(self, sequence: Sequence, first: int, end: int) -> Iterator[bytes]:
        """Of the blocks and the state to load for a beginning after ``end`` blocks; the cache has
        the ``first`` ones."""
        if self.has_whole:
            hashes = (sequence.block_hash(each, self._size) for each in range(first, end))
            yield from (each for each in hashes if self._find(each) is None)
        for number, group in self.windows:
            passed = num_passed(group, end * self._size, self._size)
            for block in range(max(first, passed), end):
                yield group_key(sequence.block_hash(block, self._size), number)
        if self._has_states:
            block_hash = sequence.block_hash(end - 1, self._size)
            if block_hash not in self._pool.keep_points:
                yield state_key(block_hash)

    def all_keys(self, sequence: Sequence, num_blocks: int) -> Iterator[bytes]:
        """Of its first blocks in all groups, and of the states after them."""
        hashes = [sequence.block_hash(each, self._size) for each in range(num_blocks)]
        for number in {0, *(each for each, _ in self.windows)}:
            yield from (group_key(each, number) for each in hashes)
        if self._has_states:
            yield from map(state_key, hashes[self._between - 1 :: self._between])

    def _end_of_whole(self, sequence: Sequence, first: int, most: int) -> int:
        end = first
        while end < most:
            key = sequence.block_hash(end, self._size)
            if self._find(key) is None and self._reach.find(key) is None:
                break
            end += 1
        return end

    def _most_with_rest(self, sequence: Sequence, first: int, end: int, loads_states: bool) -> int:
        """``end`` if stores have the rest that a sequence needs there; otherwise the most blocks
        before it that are not known to lack theirs."""
        for number, group in self.windows:
            passed = num_passed(group, end * self._size, self._size)
            for block in reversed(range(max(first, passed), end)):
                key = group_key(sequence.block_hash(block, self._size), number)
                if self._reach.find(key) is None:
                    return block
        if not self._has_states:
            return end
        if past := end % self._between:
            return end - past
        block_hash = sequence.block_hash(end - 1, self._size)
        if block_hash in self._pool.keep_points:
            return end
        is_stored = loads_states and self._reach.find(state_key(block_hash)) is not None
        return end if is_stored else end - self._between
