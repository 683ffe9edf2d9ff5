"""The KV blocks of one worker's sequences: room, tables, prefix hits. Pure.

Each group of the model's layers has a table of blocks for each sequence; all groups draw on one
pool. A group with a window gives blocks back once they are behind it, and takes the blocks of a
prompt chunk by chunk.

**Prefix hits.** Without windows a sequence may begin after any full block that the cache has. With
windows it begins at a *keep point*, with its last blocks kept in all groups: the last full block of
a prompt, and of an ended or removed sequence; a *junction*, the end of the common part of two
prompts, for a third one; and every ``KEEP_INTERVAL`` tokens of output.

**States.** Layers with a state need keep points too, each with a copy of the state. The worker
makes copies at multiples of ``copy_interval`` ids, one over the other. At a keep point the last
copy stays, and a ``Keep`` row of the next plan has the worker write the next ones elsewhere. A
chunk of a prompt ends before the copy of a keep point would be overwritten.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from math import ceil
from typing import NamedTuple

from services.scheduler.allocation import Allocation, BlockTable
from services.scheduler.block_pool import BlockPool, KeepPoint, PrefixIndex
from services.scheduler.sequence import Sequence
from shared.wire.kv_groups import copy_interval, num_passed
from shared.wire.messages import Capacity, Drop, Keep

KEEP_INTERVAL = 2048  # tokens; the most that a broken answer loses


class Hit(NamedTuple):
    """A prefix of ``num_blocks`` in the cache, and its blocks in each group of layers, without the
    ones behind a window. The group without a window has ``num_whole`` blocks of the sequence. The
    prefix may end at a keep ``point``."""

    num_blocks: int
    tables: list[list[int]]
    num_whole: int
    point: KeepPoint | None = None


class KVBlocks:
    """The blocks of the worker ``worker_id``, and the copies of states. ``rows`` are for the next
    plan. Unless it ``caches_prefixes`` its index stays empty."""

    def __init__(
        self,
        worker_id: str,
        capacity: Capacity,
        caches_prefixes: bool,
        holders: dict[bytes, str],
    ) -> None:
        self.index = PrefixIndex(worker_id, holders)
        self.has_states = capacity.num_states is not None
        num_states = (capacity.num_states or 0) if caches_prefixes else 0
        self.pool = BlockPool(capacity.num_blocks, self.index, num_states)
        self.rows: list[Drop | Keep] = []
        self._capacity = capacity
        self._size = capacity.block_size
        self._groups = capacity.groups
        self._has_whole = capacity.groups[0].window is None
        self.has_windows = any(each.window is not None for each in capacity.groups)
        self._has_keep_points = self.has_windows or self.has_states
        self._interval = copy_interval(self._size) if self.has_states else self._size
        self._caches_prefixes = caches_prefixes
        self.on_keep: Callable[[Sequence, KeepPoint], None] | None = None

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
        owned = Counter(block for each in others for block in each.allocated.blocks)
        num_freed = sum(
            self.pool.ref_count(block) == num and block not in cached
            for block, num in owned.items()
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
        if self._caches_prefixes and self._has_keep_points:
            self._begin(sequence, allocation, hit)
        if self.pool.eviction.has_evicted:
            numbers = range(hit.num_blocks, sequence.max_cached // self._size)
            missed = (sequence.block_hash(each, self._size) for each in numbers)
            allocation.standing = self.pool.eviction.standing_of(missed)
        allocation.retention_s = sequence.options.retention_s
        sequence.allocation = allocation
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Takes the blocks of a sequence back; no plan in flight names them. Of the units that
        remain in the cache, the last one is evicted first. The next turn begins at one of the last
        two keep points, so that earlier ones grow old."""
        use = allocation.standing, allocation.retention_s
        whole, *others = allocation.tables
        if not self._has_whole:
            whole, others = BlockTable([]), allocation.tables
        for table in others:
            self.pool.free(table.blocks, *use)
        if allocation.to_state is not None:
            self.pool.free_state(allocation.to_state)
        end = len(whole.blocks)
        for point in reversed(allocation.keep_points[-2:]):
            self.pool.free(whole.blocks[point.num_blocks : end], *use)
            self.pool.use(point, *use)
            end = min(end, point.num_blocks)
        self.pool.free(whole.blocks[:end], *use)

    def leave(self, sequence: Sequence, has_ended: bool) -> None:
        """Makes a keep point at the last full block of a sequence before its removal, or at the
        last copy of its state."""
        allocation = sequence.allocated
        if not self._has_keep_points or not self._caches_prefixes:
            return
        if self.has_states:
            copied = allocation.num_copied(self._interval, sequence.num_known, has_ended)
            allocation.due = min(allocation.num_indexed, (copied or 0) // self._size)
            self._keep_state(sequence, allocation, copied, goes_on=False)
        elif allocation.num_indexed:
            self.keep(sequence, allocation.num_indexed)

    def uncache(self, sequence: Sequence) -> None:
        """Removes the blocks of a running sequence from the prefix cache; it keeps them."""
        allocation = sequence.allocated
        self.pool.uncache(allocation.blocks)
        for point in allocation.keep_points:
            self.pool.forget(point)
        allocation.num_indexed = 0

    # --- prefix cache ---------------------------------------------------------------------------

    def find_hit(self, sequence: Sequence) -> Hit:
        """The longest cached prefix with a keep point, or without windows and states the longest
        one."""
        whole = self._find_whole(sequence) if self.index else []
        if not self._has_keep_points:
            return Hit(len(whole), [whole], len(whole))
        if self.pool.keep_points:
            for num in range(self._max_hit(sequence, whole), 0, -1):
                point = self.pool.keep_points.get(sequence.block_hash(num - 1, self._size))
                if point is not None:
                    tables = [whole[:num], *point.tables] if self._has_whole else point.tables
                    return Hit(num, [list(each) for each in tables], len(whole), point)
        return Hit(0, [[] for _ in self._groups], len(whole))

    def is_missing(self, sequence: Sequence, number: int) -> bool:
        """True if no prefix of more than ``number`` blocks can be in the cache, since the next
        block is missing. Always false with keep points."""
        if self._has_keep_points:
            return False
        is_last = number >= sequence.max_cached // self._size
        return is_last or self.index.find(sequence.block_hash(number, self._size)) is None

    def num_to_index(self, sequence: Sequence, has_ended: bool = False) -> int:
        """Counts the full blocks for ``index_blocks``."""
        return self._num_full(sequence, has_ended) if self._caches_prefixes else 0

    def index_blocks(self, sequence: Sequence, has_ended: bool = False) -> None:
        """Adds full blocks of ``sequence`` to the prefix cache if their ids are known and computed
        once the sent plans have run, and gives back blocks behind windows. A worker runs plans in
        order, but computes nothing, and so not the last id, of a sequence that ``has_ended``."""
        allocation, num = sequence.allocated, self._num_full(sequence, has_ended)
        if not num and not allocation.due:
            return
        for number in range(allocation.num_indexed, allocation.num_indexed + num):
            allocation.num_indexed += 1
            if self._caches_prefixes and self._has_whole:
                block_hash = sequence.block_hash(number, self._size)
                self.index.add(block_hash, allocation.tables[0].blocks[number])
            if self._has_keep_points and self._is_keep_point(sequence, allocation):
                if self.has_states:
                    allocation.due = allocation.num_indexed
                else:
                    self.keep(sequence, allocation.num_indexed)
        if self.has_windows:
            self._drop_passed(allocation)
        if allocation.due:
            copied = allocation.num_copied(self._interval, sequence.num_known, has_ended)
            self._keep_state(sequence, allocation, copied, goes_on=not has_ended)

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
        num, of_prompt = allocation.num_indexed, self._rounded(len(sequence.prompt) - 1)
        if num in (of_prompt, allocation.junction):
            return True
        return num > of_prompt and not (num - of_prompt) * self._size % KEEP_INTERVAL

    def _begin(self, sequence: Sequence, allocation: Allocation, hit: Hit) -> None:
        """Notes the use of the keep point of ``hit``, and plans those of the prompt."""
        num_whole = self._rounded(hit.num_whole * self._size)
        allocation.junction = num_whole if num_whole > hit.num_blocks else 0
        if hit.point is not None:
            self.pool.use(hit.point)
            allocation.keep_points.append(hit.point)
            allocation.from_state = hit.point.state
        if self.has_states:
            allocation.to_state = self.pool.take_state()
            allocation.copied_after = allocation.num_computed
        if allocation.to_state is not None:
            ends = {allocation.junction, self._rounded(len(sequence.prompt) - 1)}
            stops = [each * self._size for each in ends if each > hit.num_blocks]
            allocation.cuts = [partial(_cut, each, each + self._interval) for each in stops]

    def _rounded(self, num_tokens: int) -> int:
        """Counts the blocks in front of the last possible keep point of ``num_tokens``."""
        return num_tokens // self._interval * (self._interval // self._size)

    def _keep_state(
        self, sequence: Sequence, allocation: Allocation, copied: int | None, goes_on: bool
    ) -> None:
        """Makes the keep point that is due once the last copy of the state, of ``copied`` ids, is
        there."""
        num = allocation.due
        if copied is None or copied < num * self._size:
            return
        allocation.due = 0
        if num and copied == num * self._size:
            self.keep_copy(sequence, num, goes_on=goes_on)

    def keep_copy(self, sequence: Sequence, num: int, *, goes_on: bool = True) -> None:
        """Makes a keep point behind block ``num`` with the last copy of the state. The next copies
        of a sequence that ``goes_on`` are made elsewhere."""
        allocation = sequence.allocated
        if self.keep(sequence, num):
            allocation.to_state = self.pool.take_state() if goes_on else None
            allocation.copied_after = num * self._size
            if goes_on:
                self.rows.append(Keep(allocation.slot, allocation.to_state))

    def keep(self, sequence: Sequence, num: int) -> bool:
        """Makes a keep point after block ``num``, with the last copy of the state if there is one.
        Returns False if there is one already, or it began with the blocks of a later one."""
        if not self._caches_prefixes:
            return False
        allocation, tables = sequence.allocated, []
        for group, table in zip(self._groups, allocation.tables, strict=True):
            if group.window is not None:
                first = num_passed(group, num * self._size, self._size) - table.num_passed
                if first < 0:
                    return False
                tables.append(table.blocks[first : num - table.num_passed])
        block_hash = sequence.block_hash(num - 1, self._size)
        is_new = block_hash not in self.pool.keep_points
        point = self.pool.keep(block_hash, num, tables, allocation.to_state)
        if point not in allocation.keep_points:
            allocation.keep_points.append(point)
        if is_new and self.on_keep is not None:
            self.on_keep(sequence, point)
        return is_new

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
                self.rows.append(Drop(allocation.slot, number, table.num_passed))


def _cut(stop: int, limit: int, first: int, end: int, most: int) -> int:
    """A chunk that would reach ``limit`` stops before the copy at ``stop`` is overwritten."""
    return stop if first < stop and limit <= end else end
