"""The KV blocks of one worker's sequences: room, tables, prefix hits. Pure.

Each group of the model's layers has a table of blocks for each sequence; all groups draw on one
pool. A group with a window gives blocks back once they are behind it, and takes the blocks of a
prompt chunk by chunk.

**Prefix hits.** Without windows a sequence may begin after any full block that the cache has. With
windows it begins at a *keep point*, with its last blocks kept in all groups: the last full block of
a prompt, and of an ended or removed sequence; a *junction*, the end of the common part of two
prompts, for a third one; and every ``KEEP_INTERVAL`` tokens of output.
"""

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from services.scheduler.block_pool import BlockPool, PrefixIndex
from services.scheduler.sequence import Allocation, BlockTable, Sequence
from shared.wire.kv_groups import num_passed
from shared.wire.messages import Capacity, Drop

KEEP_INTERVAL = 2048  # tokens; the most that a broken answer loses


class Hit(NamedTuple):
    """A prefix of ``num_blocks`` in the cache, and its blocks in each group of layers, without the
    ones behind a window. The group without a window has ``num_whole`` blocks of the sequence."""

    num_blocks: int
    tables: list[list[int]]
    num_whole: int


class KVBlocks:
    """The blocks of the worker ``worker_id``. ``drops`` are the blocks given back since the last
    plan. Unless it ``caches_prefixes`` its index stays empty."""

    def __init__(
        self,
        worker_id: str,
        capacity: Capacity,
        caches_prefixes: bool,
        holders: dict[bytes, str],
    ) -> None:
        self.index = PrefixIndex(worker_id, holders)
        self.pool = BlockPool(capacity.num_blocks, self.index)
        self.drops: list[Drop] = []
        self._capacity = capacity
        self._size = capacity.block_size
        self._groups = capacity.groups
        self._has_whole = capacity.groups[0].window is None
        self.has_windows = any(each.window is not None for each in capacity.groups)
        self._caches_prefixes = caches_prefixes

    # --- room -----------------------------------------------------------------------------------

    def num_lacking(self, sequence: Sequence, num_places: int, end: int) -> int:
        """Counts the blocks to add to a running sequence with ``end`` ids at most, for
        ``num_places`` of them."""
        return sum(self._lacking(sequence, num_places, end))

    def try_extend(self, sequence: Sequence, num_places: int, end: int) -> list[list[int]] | None:
        """Gives a running sequence the blocks it lacks for ``num_places`` ids. Returns them for
        each group, nothing if it lacks none, or None if too few are free."""
        allocation = sequence.allocated
        lacking = self._lacking(sequence, num_places, end)
        taken = self.pool.try_allocate(sum(lacking))
        if taken is None:
            return None
        blocks, start = [], 0
        for table, num in zip(allocation.tables, lacking, strict=True):
            blocks.append(taken[start : start + num])
            table.blocks += blocks[-1]
            start += num
        allocation.num_places = self._size * min(each.num_blocks for each in allocation.tables)
        return blocks if taken else []

    def has_room_for(
        self, sequence: Sequence, num_places: int, end: int, num_freed: int = 0
    ) -> bool:
        """True if there are enough blocks for a waiting sequence, with ``num_freed`` more. Cached
        blocks owned by other sequences cost nothing."""
        num_free = self.pool.num_free + num_freed
        if not self.has_windows and ceil(min(num_places, end) / self._size) <= num_free:
            return True
        hit = self.find_hit(sequence)
        num_shared = sum(self.pool.ref_count(block) > 0 for each in hit.tables for block in each)
        return sum(self._wanted(sequence, num_places, end, hit)) - num_shared <= num_free

    def has_room_without(
        self, others: Iterable[Sequence], sequence: Sequence, num_places: int, end: int
    ) -> bool:
        """True if there would be blocks for a waiting sequence without ``others``."""
        cached = {block for each in self.find_hit(sequence).tables for block in each}
        num_freed = sum(
            self.pool.ref_count(block) == 1 and block not in cached
            for each in others
            for block in each.allocated.blocks
        )
        return self.has_room_for(sequence, num_places, end, num_freed)

    def _lacking(self, sequence: Sequence, num_places: int, end: int) -> list[int]:
        """Counts the blocks to add in each group."""
        tables = sequence.allocated.tables
        if not self.has_windows:
            return [max(0, ceil(min(num_places, end) / self._size) - len(tables[0].blocks))]
        wanted = self._wanted_up_to(num_places, end, sequence.num_to_compute)
        return [max(0, num - table.num_blocks) for num, table in zip(wanted, tables, strict=True)]

    def _wanted(self, sequence: Sequence, num_places: int, end: int, hit: Hit) -> list[int]:
        """Counts the blocks in each group of a waiting sequence, those of ``hit`` included."""
        num_computed = hit.num_blocks * self._size
        wanted = self._wanted_up_to(num_places, end, sequence.num_known - num_computed)
        passed = [num_passed(each, num_computed, self._size) for each in self._groups]
        return [num - first for num, first in zip(wanted, passed, strict=True)]

    def _wanted_up_to(self, num_places: int, end: int, num_to_compute: int) -> list[int]:
        """Counts the blocks of each group from the first id on. A group with a window has them for
        the most ids that the next step can compute of ``num_to_compute``."""
        num_later = max(0, num_to_compute - self._capacity.max_num_batched_tokens)
        whole = ceil(min(num_places, end) / self._size)
        windowed = ceil(min(num_places - num_later, end) / self._size)
        return [whole if each.window is None else windowed for each in self._groups]

    # --- tables ---------------------------------------------------------------------------------

    def allocate(self, sequence: Sequence, worker_id: str, slot: int) -> Allocation:
        """Gives a waiting sequence its slot and the blocks of its longest cached prefix."""
        hit = self.find_hit(sequence)
        num_computed = hit.num_blocks * self._size
        tables = []
        for group, blocks in zip(self._groups, hit.tables, strict=True):
            self.pool.share(blocks)
            tables.append(BlockTable(blocks, num_passed(group, num_computed, self._size)))
        allocation = Allocation(worker_id, slot, tables, hit.num_blocks, num_computed)
        if self.pool.eviction.has_evicted:
            numbers = range(hit.num_blocks, sequence.max_cached // self._size)
            missed = (sequence.block_hash(each, self._size) for each in numbers)
            allocation.standing = self.pool.eviction.standing_of(missed)
        if self.has_windows:
            allocation.junction = hit.num_whole if hit.num_whole > hit.num_blocks else 0
            if hit.num_blocks:
                self._keep(sequence, allocation)
        sequence.allocation = allocation
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Takes the blocks of a sequence back; no plan in flight names them. Of the units that
        remain in the cache, the last one is evicted first. The next turn begins at one of the last
        two keep points, so that earlier ones grow old."""
        standing = allocation.standing
        whole, *others = allocation.tables
        if not self._has_whole:
            whole, others = BlockTable([]), allocation.tables
        for table in others:
            self.pool.free(table.blocks, standing)
        end = len(whole.blocks)
        for point in reversed(allocation.keep_points[-2:]):
            self.pool.free(whole.blocks[point.num_blocks : end], standing)
            self.pool.use(point, standing)
            end = min(end, point.num_blocks)
        self.pool.free(whole.blocks[:end], standing)

    def leave(self, sequence: Sequence) -> None:
        """Makes a keep point at the last full block of a sequence before its removal."""
        allocation = sequence.allocated
        if self.has_windows and allocation.num_indexed:
            self._keep(sequence, allocation)

    def uncache(self, sequence: Sequence) -> None:
        """Removes the blocks of a running sequence from the prefix cache; it keeps them."""
        allocation = sequence.allocated
        self.pool.uncache(allocation.blocks)
        for point in allocation.keep_points:
            self.pool.forget(point)
        allocation.num_indexed = 0

    # --- prefix cache ---------------------------------------------------------------------------

    def find_hit(self, sequence: Sequence) -> Hit:
        """The longest cached prefix with a keep point, or without windows the longest one."""
        whole = self._find_whole(sequence) if self.index else []
        if not self.has_windows:
            return Hit(len(whole), [whole], len(whole))
        if self.pool.keep_points:
            for num in range(self._max_hit(sequence, whole), 0, -1):
                point = self.pool.keep_points.get(sequence.block_hash(num - 1, self._size))
                if point is not None:
                    tables = [whole[:num], *point.tables] if self._has_whole else point.tables
                    return Hit(num, [list(each) for each in tables], len(whole))
        return Hit(0, [[] for _ in self._groups], len(whole))

    def is_missing(self, sequence: Sequence, number: int) -> bool:
        """True if no prefix of more than ``number`` blocks can be in the cache, since the next
        block is missing. Always false with windows."""
        if self.has_windows:
            return False
        is_last = number >= sequence.max_cached // self._size
        return is_last or self.index.find(sequence.block_hash(number, self._size)) is None

    def num_to_index(self, sequence: Sequence, has_ended: bool = False) -> int:
        """Counts the full blocks for ``index_blocks``."""
        if not self._caches_prefixes:
            return 0
        return self._num_full(sequence, has_ended)

    def index_blocks(self, sequence: Sequence, has_ended: bool = False) -> None:
        """Adds full blocks of ``sequence`` to the prefix cache if their ids are known and computed
        once the sent plans have run, and gives back blocks behind windows. A worker runs plans in
        order, but computes nothing, and so not the last id, of a sequence that ``has_ended``."""
        allocation, num = sequence.allocated, self._num_full(sequence, has_ended)
        if not num:
            return
        for number in range(allocation.num_indexed, allocation.num_indexed + num):
            allocation.num_indexed += 1
            if self._caches_prefixes and self._has_whole:
                block_hash = sequence.block_hash(number, self._size)
                self.index.add(block_hash, allocation.tables[0].blocks[number])
            if self.has_windows and self._is_keep_point(sequence, allocation):
                self._keep(sequence, allocation)
        if self.has_windows:
            self._drop_passed(allocation)

    def _num_full(self, sequence: Sequence, has_ended: bool) -> int:
        allocation = sequence.allocated
        num_known = len(sequence.prompt) + len(sequence.emitted)
        num_tokens = min(allocation.num_computed, num_known - has_ended)
        return num_tokens // self._size - allocation.num_indexed

    def _find_whole(self, sequence: Sequence) -> list[int]:
        """The cached blocks of the group without a window, from the first one on."""
        blocks: list[int] = []
        for number in range(sequence.max_cached // self._size):
            block = self.index.find(sequence.block_hash(number, self._size))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _max_hit(self, sequence: Sequence, whole: list[int]) -> int:
        return len(whole) if self._has_whole else sequence.max_cached // self._size

    def _is_keep_point(self, sequence: Sequence, allocation: Allocation) -> bool:
        """True behind block ``num_indexed``."""
        num, of_prompt = allocation.num_indexed, (len(sequence.prompt) - 1) // self._size
        if num in (of_prompt, allocation.junction):
            return True
        return num > of_prompt and not (num - of_prompt) * self._size % KEEP_INTERVAL

    def _keep(self, sequence: Sequence, allocation: Allocation) -> None:
        """Makes a keep point behind the last full block."""
        if not self._caches_prefixes:
            return
        num = allocation.num_indexed
        tables = []
        for group, table in zip(self._groups, allocation.tables, strict=True):
            if group.window is not None:
                first = num_passed(group, num * self._size, self._size)
                tables.append(table.blocks[first - table.num_passed : num - table.num_passed])
        block_hash = sequence.block_hash(num - 1, self._size)
        point = self.pool.keep(block_hash, num, tables)
        if point not in allocation.keep_points:
            allocation.keep_points.append(point)

    def _drop_passed(self, allocation: Allocation) -> None:
        """Gives back the blocks behind windows. All plans after the sent ones compute ids behind
        the last full block, and the worker runs plans in order: its last read of such a block
        precedes the first write of the next owner."""
        num_computed = allocation.num_indexed * self._size
        for number, (group, table) in enumerate(zip(self._groups, allocation.tables, strict=True)):
            num = num_passed(group, num_computed, self._size) - table.num_passed
            if num > 0:
                self.pool.free(table.blocks[:num])
                del table.blocks[:num]
                table.num_passed += num
                self.drops.append(Drop(allocation.slot, number, table.num_passed))
