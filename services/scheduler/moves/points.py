"""Keep points that move in parts: at the worker that sends them, and at the one they come to. Pure.

A part comes as a keep point of its own, under a name that no prefix has: like a cached block it may
be evicted. Once all are there, they are one keep point, where sequences may begin.
"""

from dataclasses import dataclass, field
from hashlib import blake2b

from services.scheduler.allocation import Allocation
from services.scheduler.block_pool import HASH_BYTES, KeepPoint
from services.scheduler.sequence import Sequence
from services.scheduler.worker_state import WorkerState
from shared.errors import CodecError
from shared.wire.kv_groups import copy_interval, has_windows, num_passed
from shared.wire.messages import Capacity, Keep, Part


def key_of(part: Part) -> bytes:
    """The name of a part, of use to its keep point alone."""
    number = -1 if part.group is None else part.group
    place = b"%d %d %d" % (part.num_blocks, part.number, number)
    return blake2b(part.point + place, digest_size=HASH_BYTES).digest()


class PointShape:
    """The parts of keep points of a worker with ``capacity``, whose states have ``num_pieces``.
    Points lie ``interval`` blocks apart at least. If it ``has_whole``, the first group of layers
    has no window; its blocks are no parts."""

    def __init__(self, capacity: Capacity, num_pieces: int) -> None:
        has_states = capacity.num_states is not None
        size = self.block_size = capacity.block_size
        self.has_points = has_states or has_windows(capacity)
        self.has_whole = capacity.groups[0].window is None
        self.interval = copy_interval(size) // size if has_states else 1
        self._num_pieces = num_pieces if has_states else 0
        self._most = capacity.max_model_len // size
        self._windows = {
            number: group for number, group in enumerate(capacity.groups) if group.window
        }

    def parts(self, block_hash: bytes, num_blocks: int) -> list[Part]:
        """The parts of the keep point after ``num_blocks``, the last of which has that hash."""
        blocks = [
            Part(block_hash, num_blocks, number, group)
            for group in self._windows
            for number in range(self._first(group, num_blocks), num_blocks)
        ]
        return blocks + [Part(block_hash, num_blocks, each) for each in range(self._num_pieces)]

    def number_in(self, point: KeepPoint, part: Part) -> int:
        """The block, or the copy of a state, that has a part of ``point``."""
        if part.group is None:
            assert point.state is not None
            return point.state
        table = point.tables[list(self._windows).index(part.group)]
        return table[part.number - self._first(part.group, part.num_blocks)]

    def check(self, key: bytes, part: Part) -> None:
        """Raises CodecError."""
        end = part.num_blocks
        is_point = 0 < end <= self._most and not end % self.interval
        if part.group is None:
            is_there = part.number < self._num_pieces
        else:
            is_window = part.group in self._windows
            is_there = is_window and self._first(part.group, end) <= part.number < end
        if not (is_point and is_there) or key != key_of(part):
            raise CodecError(f"no part of a keep point is {part} with key {key.hex()}")

    def join(self, units: dict[Part, KeepPoint]) -> list[list[int]]:
        """The tables of a keep point."""
        return [
            [unit.tables[0][0] for part, unit in units.items() if part.group == group]
            for group in self._windows
        ]

    def _first(self, group: int, num_blocks: int) -> int:
        size = self.block_size
        return num_passed(self._windows[group], num_blocks * size, size)


@dataclass(slots=True)
class _Coming:
    """A keep point that comes in ``parts``; the ``units`` in the cache have some of them."""

    parts: list[Part]
    units: dict[Part, KeepPoint] = field(default_factory=dict)


class ComingPoints:
    """The keep points that come to ``worker`` in parts."""

    def __init__(self, worker: WorkerState, shape: PointShape) -> None:
        self._pool, self._shape = worker.pool, shape
        self._coming: dict[bytes, _Coming] = {}  # by name of the point

    def has(self, part: Part) -> bool:
        """True if the worker has the part, or the whole keep point."""
        return part.point in self._pool.keep_points or self._find(part) is not None

    def take(self, part: Part) -> int | None:
        """Returns the block or the copy of a state that gets a missing part; None if none is
        free."""
        unit = self._unit_for(part)
        if unit is None:
            return None
        if (coming := self._coming.get(part.point)) is None:
            self._forget_evicted()
            coming = _Coming(self._shape.parts(part.point, part.num_blocks))
            self._coming[part.point] = coming
        coming.units[part] = unit
        self._pool.use(unit)
        number = unit.tables[0][0] if unit.state is None else unit.state
        is_whole = len(coming.units) == len(coming.parts)
        if is_whole and all(map(self._is_here, coming.units.values())):
            self._join(part, {each: coming.units[each] for each in coming.parts})
        return number

    def forget(self, block_hash: bytes) -> None:
        """The keep point with that name, and its parts, may be wrong."""
        coming = self._coming.pop(block_hash, None)
        units = {*coming.units.values()} if coming is not None else set()
        if (point := self._pool.keep_points.get(block_hash)) is not None:
            units.add(point)
        for each in units:
            self._pool.forget(each)

    def _find(self, part: Part) -> KeepPoint | None:
        coming = self._coming.get(part.point)
        unit = coming.units.get(part) if coming is not None else None
        return unit if unit is not None and self._is_here(unit) else None

    def _is_here(self, unit: KeepPoint) -> bool:
        return self._pool.keep_points.get(unit.block_hash) is unit

    def _unit_for(self, part: Part) -> KeepPoint | None:
        """All pieces of a state are one unit, named by the first one that came."""
        pool, key = self._pool, key_of(part)
        if part.group is not None:
            if (blocks := pool.try_allocate(1)) is None:
                return None
            unit = pool.keep(key, part.num_blocks, [blocks])
            pool.free(blocks)
            return unit
        coming = self._coming.get(part.point)
        for unit in coming.units.values() if coming is not None else ():
            if unit.state is not None and self._is_here(unit):
                return unit
        if (state := pool.take_state()) is None:
            return None
        return pool.keep(key, part.num_blocks, [], state)

    def _join(self, part: Part, units: dict[Part, KeepPoint]) -> None:
        """The last part has come."""
        pool, tables, state = self._pool, self._shape.join(units), None
        found = {each.state: each for each in units.values() if each.state is not None}
        for each in found.values():
            pool.forget(each)
            state = pool.take_state()  # the one that was freed last
            assert state == each.state
        pool.keep(part.point, part.num_blocks, tables, state)
        for each in units.values():
            pool.forget(each)
        del self._coming[part.point]

    def _forget_evicted(self) -> None:
        self._coming = {
            name: coming
            for name, coming in self._coming.items()
            if any(map(self._is_here, coming.units.values()))
        }


def newest_point(worker: WorkerState, sequence: Sequence, shape: PointShape) -> KeepPoint | None:
    """The last keep point of a running sequence that another worker can use. One is made at the end
    of the computed part if possible: between plans, so that the next one has its row."""
    allocation, blocks = sequence.allocated, worker.blocks
    most = min(allocation.num_indexed, sequence.max_cached // shape.block_size)
    if blocks.has_states:
        _keep_state(worker, sequence, most)
    elif most:
        blocks.keep(sequence, most)
    kept = worker.pool.keep_points
    usable = [
        each
        for each in allocation.keep_points
        if kept.get(each.block_hash) is each and each.num_blocks <= most
    ]
    return max(usable, key=lambda each: each.num_blocks, default=None)


def _keep_state(worker: WorkerState, sequence: Sequence, most: int) -> None:
    """Keeps the last copy of its state. A sequence without copies makes them from now on."""
    allocation, blocks, pool = sequence.allocated, worker.blocks, worker.pool
    interval = copy_interval(worker.capacity.block_size)
    if allocation.to_state is None:
        if (state := pool.take_state()) is not None:
            allocation.copied_after = allocation.num_computed
            _copy_to(worker, allocation, state)
        return
    copied = allocation.num_copied(interval, sequence.num_known, has_ended=False)
    num = (copied or 0) // worker.capacity.block_size
    if not 0 < num <= most:
        return
    has_more = bool(pool.num_free_states or pool.num_kept_states)
    if has_more:
        blocks.keep_copy(sequence, num)
    elif blocks.keep(sequence, num):  # another copy would take the place of this one
        allocation.copied_after = num * worker.capacity.block_size
        _copy_to(worker, allocation, None)


def _copy_to(worker: WorkerState, allocation: Allocation, state: int | None) -> None:
    allocation.to_state = state
    worker.blocks.rows.append(Keep(allocation.slot, state))
