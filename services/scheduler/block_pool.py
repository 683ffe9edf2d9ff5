"""Ownership of one worker's KV blocks, and its prefix cache. Pure."""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b

from services.scheduler.eviction import Eviction, Standing

HASH_BYTES = 16
RETAINED_SHARE = 0.5  # of the units, for requests that ask for a time. Chosen


class BlockHashes:
    """Block hashes of a sequence, computed on first use.

    The KV of a block depends on all ids up to its end, so its hash is a chain: 128 bits of blake2b
    over the previous block's hash and the block's content. The chain begins with ``root``
    (``hash_root``).
    """

    def __init__(self, block_size: int, root: bytes) -> None:
        self.block_size = block_size
        self._chain = [root]

    def block_hash(self, number: int, content: Callable[[int, int], bytes]) -> bytes:
        """``content(start, end)`` returns the int32 ids between two positions as bytes, and all
        that they stand for. All ids of the block must be known."""
        chain, size = self._chain, self.block_size
        while len(chain) <= number + 1:
            end = len(chain) * size
            chain.append(_digest(chain[-1] + content(end - size, end)))
        return chain[number + 1]


class PrefixIndex:
    """Maps block hashes of one worker to its blocks, one to one. ``holders``, shared by the indices
    of all workers, names for each hash the last worker that added it, until that worker drops
    it."""

    def __init__(self, worker_id: str, holders: dict[bytes, str]) -> None:
        self._worker_id = worker_id
        self._holders = holders
        self._blocks: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}
        self.on_add: Callable[[bytes, int], None] | None = None

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._hashes

    def block_hash(self, block: int) -> bytes | None:
        return self._hashes.get(block)

    def find(self, block_hash: bytes) -> int | None:
        return self._blocks.get(block_hash)

    def add(self, block_hash: bytes, block: int) -> None:
        """Does nothing if the hash has a block: another sequence computed the same ids first."""
        if block_hash not in self._blocks:
            self._blocks[block_hash] = block
            self._hashes[block] = block_hash
            self._holders[block_hash] = self._worker_id
            if self.on_add is not None:
                self.on_add(block_hash, block)

    def drop(self, block: int) -> None:
        """Does nothing for a block outside the index."""
        block_hash = self._hashes.pop(block, None)
        if block_hash is not None:
            del self._blocks[block_hash]
            self._forget(block_hash)

    def clear(self) -> None:
        for block_hash in self._blocks:
            self._forget(block_hash)
        self._blocks.clear()
        self._hashes.clear()

    def _forget(self, block_hash: bytes) -> None:
        if self._holders.get(block_hash) == self._worker_id:
            del self._holders[block_hash]


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=HASH_BYTES).digest()


@dataclass(frozen=True, slots=True, eq=False)
class KeepPoint:
    """The end of a prefix of ``num_blocks`` blocks, and the start of other sequences in spite of
    windows and states: ``tables`` has the last blocks of the prefix for each group of layers with a
    window, and ``state`` is the copy of its state. ``block_hash`` is the hash of its last block."""

    block_hash: bytes
    num_blocks: int
    tables: list[list[int]]
    state: int | None = None

    @property
    def blocks(self) -> Iterable[int]:
        return (block for table in self.tables for block in table)


class BlockPool:
    """Allocates the ids of ``num_blocks`` blocks, and of ``num_states`` copies of states. Each
    block is free, cached, or owned by one or more sequences; each copy is free, owned by a
    sequence, or in a keep point.

    A cached block has no owner but is in ``index`` or in a keep point: it can be shared again, and
    counts as free. Allocation evicts units (``Eviction``) once no others are free. A unit is a
    block of the index, or a keep point with its blocks. Of one sequence the last unit is evicted
    first, since the units before it are usable without it.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex, num_states: int = 0) -> None:
        self.num_blocks = num_blocks
        self._free_states = list(range(num_states - 1, -1, -1))
        self.num_owned = 0  # pairs of a block and an owner
        self.keep_points: dict[bytes, KeepPoint] = {}  # by block hash
        self._index = index
        self._free: list[int] = []  # blocks that were used before
        self._num_used = 0  # blocks with an id below it were used before
        self.eviction: Eviction[int | KeepPoint] = Eviction(
            max_evicted=num_blocks, max_retained=int(RETAINED_SHARE * num_blocks)
        )
        self._num_cached = 0
        self._ref_counts = array("i", bytes(4 * num_blocks))
        self._keep_counts: dict[int, int] = {}  # keep points of a block
        self._uses: dict[KeepPoint, None] = {}  # the last use last

    @property
    def num_free(self) -> int:
        return len(self._free) + self._num_cached + self.num_blocks - self._num_used

    @property
    def num_kept_states(self) -> int:
        return sum(each.state is not None for each in self.keep_points.values())

    @property
    def num_free_states(self) -> int:
        return len(self._free_states)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def try_allocate(self, num: int) -> list[int] | None:
        """Returns ``num`` blocks, or None (and takes none) if fewer are free."""
        if num > self.num_free:
            return None
        start = max(0, len(self._free) - num)
        taken = self._free[start:][::-1]
        del self._free[start:]
        num_new = min(num - len(taken), self.num_blocks - self._num_used)
        taken.extend(range(self._num_used, self._num_used + num_new))
        self._num_used += num_new
        while len(taken) < num:
            if self._free:
                taken.append(self._free.pop())
            else:
                self._evict()
        for block in taken:
            self._ref_counts[block] = 1
        self.num_owned += num
        return taken

    def share(self, blocks: list[int]) -> None:
        """Adds an owner to each of the cached or owned ``blocks``."""
        for block in blocks:
            if not self._ref_counts[block]:
                self.eviction.discard(block)
                self._num_cached -= 1
            self._ref_counts[block] += 1
        self.num_owned += len(blocks)

    def free(
        self, blocks: list[int], standing: Standing = Standing.USUAL, retention_s: float = 0
    ) -> None:
        """Removes an owner of this ``standing`` from each of ``blocks``, and caches them for at
        least ``retention_s`` if possible. Raises ValueError for a block without owners: two
        sequences would write to it."""
        for block in reversed(blocks):
            if not self._ref_counts[block]:
                raise ValueError(f"block {block} was given back twice")
            self._ref_counts[block] -= 1
            if not self._ref_counts[block]:
                self._set_free(block, standing, retention_s)
        self.num_owned -= len(blocks)

    def take_state(self) -> int | None:
        """Returns a copy without an owner, if need be that of the keep point to evict first."""
        if not self._free_states and self._uses:
            point = min(self._uses, key=self.eviction.rank)
            self.eviction.evict(point)
            self.forget(point)
        return self._free_states.pop() if self._free_states else None

    def free_state(self, state: int) -> None:
        self._free_states.append(state)

    def keep(
        self, block_hash: bytes, num_blocks: int, tables: list[list[int]], state: int | None = None
    ) -> KeepPoint:
        """Returns the keep point at ``block_hash`` and notes its use; a new one gets the owned
        blocks of ``tables`` and the ``state``."""
        point = self.keep_points.get(block_hash)
        if point is None:
            point = self.keep_points[block_hash] = KeepPoint(block_hash, num_blocks, tables, state)
            for block in point.blocks:
                self._keep_counts[block] = self._keep_counts.get(block, 0) + 1
        self.use(point)
        return point

    def use(
        self, point: KeepPoint, standing: Standing = Standing.USUAL, retention_s: float = 0
    ) -> None:
        """Notes the last use of ``point``. Does nothing for an evicted one."""
        if self.keep_points.get(point.block_hash) is point:
            self.eviction.put(point, point.block_hash, standing, retention_s)
            self._uses.pop(point, None)
            self._uses[point] = None

    def forget(self, point: KeepPoint) -> None:
        """Removes ``point`` from the prefix cache. Does nothing for an evicted one."""
        if self.keep_points.get(point.block_hash) is not point:
            return
        del self.keep_points[point.block_hash]
        self.eviction.discard(point)
        del self._uses[point]
        if point.state is not None:
            self.free_state(point.state)
        for block in point.blocks:
            self._keep_counts[block] -= 1
            if not self._keep_counts[block]:
                del self._keep_counts[block]
                if not self._ref_counts[block]:
                    self._num_cached -= 1
                    self._free.append(block)

    def uncache(self, blocks: list[int]) -> None:
        """Removes ``blocks`` from the index; their owners keep them."""
        for block in blocks:
            self._index.drop(block)

    def reset_cache(self) -> None:
        """Empties the prefix cache. Owned blocks stay with their owners."""
        while self.eviction:
            self._evict()
        self.eviction.clear()
        self._index.clear()

    def _set_free(self, block: int, standing: Standing, retention_s: float) -> None:
        block_hash = self._index.block_hash(block)
        if block_hash is not None:
            self.eviction.put(block, block_hash, standing, retention_s)
            self._num_cached += 1
        elif block in self._keep_counts:
            self._num_cached += 1
        else:
            self._free.append(block)

    def _evict(self) -> None:
        """Evicts a unit; no block is free afterwards if all blocks of a keep point have owners or
        are in others."""
        unit = self.eviction.pop()
        if isinstance(unit, KeepPoint):
            self.forget(unit)
            return
        self._num_cached -= 1
        self._index.drop(unit)
        self._free.append(unit)
