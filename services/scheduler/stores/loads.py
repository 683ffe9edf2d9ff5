"""The loads of a sequence that begins behind its hit in the cache. Pure.

It shares the blocks that the cache has up to there, and loads the other ones to its own. A state is
loaded to the copy of the sequence.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

from services.scheduler.sequence import Sequence
from services.scheduler.stores.disk import Copy, Held
from services.scheduler.stores.hits import StoreHits
from services.scheduler.stores.index import Reach, group_key, state_key
from services.scheduler.stores.tables import LaterTables
from services.scheduler.worker_state import WorkerState


class Loads:
    """Of sequences of ``worker``, which finds ``hits`` in ``reach``."""

    def __init__(self, worker: WorkerState, reach: Reach, hits: StoreHits) -> None:
        self._reach, self._hits = reach, hits
        self._pool, self._find = worker.pool, worker.index.find
        self._size = worker.capacity.block_size
        self._has_states = worker.blocks.has_states
        self._tables = LaterTables(worker.capacity, worker.pool)

    def has_room(self, held: Held, end: int) -> bool:
        return self._tables.has_room(held.allocation, end)

    def take(self, held: Held, first: int, end: int) -> list[Copy]:
        """The copies with which the sequence begins after ``end`` blocks. Their places are
        pinned."""
        found = [*self._take_whole(held, first, end), *self._take_last(held, first, end)]
        for each in found:
            each.places.pin(each.key)
        return found

    def use(self, sequence: Sequence, num_blocks: int, ends: Iterable[int]) -> None:
        """Notes the use of its first blocks: the last one is overwritten first, since the ones
        before it are usable without it. So are the last blocks and states at ``ends``."""
        numbers = reversed(range(num_blocks if self._hits.has_whole else 0))
        whole = (sequence.block_hash(each, self._size) for each in numbers)
        last = (key for end in ends for key in self._hits.last_keys(sequence, end))
        for key in chain(whole, last):
            self._reach.use(key)

    def _take_whole(self, held: Held, first: int, end: int) -> Iterator[Copy]:
        """Shares the blocks in the cache; yields the loads of the other ones."""
        if not self._hits.has_whole:
            return
        blocks = held.allocation.tables[0].blocks
        for number in range(first, end):
            key = held.sequence.block_hash(number, self._size)
            if (cached := self._find(key)) is None:
                yield self._copy(held, key, blocks[number])
            else:
                self._pool.share([cached])
                self._pool.free([blocks[number]])
                blocks[number] = cached

    def _take_last(self, held: Held, first: int, end: int) -> Iterator[Copy]:
        """The loads for layers with windows or a state. Blocks are taken after the cached ones are
        shared, which they may evict."""
        self._tables.move(held.allocation, end)
        for group, _ in self._hits.windows:
            table = held.allocation.tables[group]
            for number in range(max(first, table.num_passed), end):
                key = group_key(held.sequence.block_hash(number, self._size), group)
                yield self._copy(held, key, table.blocks[number - table.num_passed])
        if self._has_states:
            yield from self._take_state(held, end)

    def _take_state(self, held: Held, end: int) -> Iterator[Copy]:
        """Has the slot begin with the state behind ``end`` blocks; yields its load if the cache
        lacks it."""
        allocation = held.allocation
        key = held.sequence.block_hash(end - 1, self._size)
        allocation.copied_after = end * self._size
        if (point := self._pool.keep_points.get(key)) is not None:
            self._pool.use(point)
            allocation.keep_points.append(point)
            allocation.from_state = point.state
            return
        allocation.from_state = allocation.to_state
        assert allocation.to_state is not None
        yield self._copy(held, state_key(key), allocation.to_state, allocation.slot)

    def _copy(self, held: Held, key: bytes, number: int, slot: int | None = None) -> Copy:
        found = self._reach.find(key)
        assert found is not None
        store, places, is_on_disk = found
        place = places.first + places.full[key]
        return Copy(held, key, number, store, places, place, slot, is_on_disk)
