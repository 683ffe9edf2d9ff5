"""The tables of a sequence that begins after its hit in the cache. Pure.

Its blocks before the windows of the later beginning are given back, and the ones up to there are
taken, to be loaded.
"""

from services.scheduler.allocation import Allocation, BlockTable
from services.scheduler.block_pool import BlockPool
from shared.wire.kv_groups import num_passed
from shared.wire.messages import Capacity


class LaterTables:
    """Of the sequences of a worker with ``capacity`` and ``pool``."""

    def __init__(self, capacity: Capacity, pool: BlockPool) -> None:
        self._groups, self._size = capacity.groups, capacity.block_size
        self._pool = pool

    def has_room(self, allocation: Allocation, end: int) -> bool:
        """True if there are blocks to begin after ``end`` blocks."""
        num_lacking = 0
        for table, first in self._windows(allocation, end):
            passed = table.blocks[: first - table.num_passed]
            num_lacking += end - max(first, min(end, table.num_blocks))
            num_lacking -= sum(self._pool.ref_count(each) == 1 for each in passed)
        return num_lacking <= self._pool.num_free

    def move(self, allocation: Allocation, end: int) -> None:
        """There must be room."""
        tables = self._windows(allocation, end)
        for table, first in tables:
            num = first - table.num_passed
            self._pool.free(table.blocks[:num])
            del table.blocks[:num]
            table.num_passed = first
        for table, _ in tables:
            taken = self._pool.try_allocate(max(0, end - table.num_blocks))
            assert taken is not None
            table.blocks += taken
        allocation.num_places = self._size * min(each.num_blocks for each in allocation.tables)

    def _windows(self, allocation: Allocation, end: int) -> list[tuple[BlockTable, int]]:
        """The tables of groups with windows, and the number of blocks before each window."""
        pairs = zip(self._groups, allocation.tables, strict=True)
        return [
            (table, num_passed(group, end * self._size, self._size))
            for group, table in pairs
            if group.window is not None
        ]
