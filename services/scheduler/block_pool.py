"""Counts the owners of each KV block of one worker."""

from array import array

from services.scheduler.prefix_index import PrefixIndex


class BlockPool:
    """Hands out ids of ``num_blocks`` blocks. Each is free, cached, or owned by so many sequences.

    A cached block has no owner, but ``index`` knows what it holds: it can be shared again, and
    counts as free. When blocks are short the least recently used ones are evicted; of the blocks of
    one sequence the last one goes first, for without it the others are still of use.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self.num_blocks = num_blocks
        self.num_owned = 0  # once for each sequence that owns a block
        self._index = index
        self._free: list[int] = []  # of the blocks that were used before
        self._num_used = 0  # the first of all blocks
        self._cached: dict[int, None] = {}  # in the order of their last use
        self._ref_counts = array("i", bytes(4 * num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._cached) + self.num_blocks - self._num_used

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def try_allocate(self, num: int) -> list[int] | None:
        """Returns ``num`` blocks, or None and takes nothing when there are fewer."""
        if num > self.num_free:
            return None
        start = max(0, len(self._free) - num)
        taken = self._free[start:][::-1]
        del self._free[start:]
        num_new = min(num - len(taken), self.num_blocks - self._num_used)
        taken.extend(range(self._num_used, self._num_used + num_new))
        self._num_used += num_new
        while len(taken) < num:
            taken.append(self._evict())
        for block in taken:
            self._ref_counts[block] = 1
        self.num_owned += num
        return taken

    def share(self, blocks: list[int]) -> None:
        """Adds an owner to each of ``blocks``, which the index holds."""
        for block in blocks:
            self._cached.pop(block, None)
            self._ref_counts[block] += 1
        self.num_owned += len(blocks)

    def free(self, blocks: list[int]) -> None:
        """Takes an owner from each of ``blocks``. Raises ValueError for a block without owners: two
        sequences would write to it."""
        for block in reversed(blocks):
            if not self._ref_counts[block]:
                raise ValueError(f"block {block} was given back twice")
            self._ref_counts[block] -= 1
            if not self._ref_counts[block]:
                self._set_free(block)
        self.num_owned -= len(blocks)

    def uncache(self, blocks: list[int]) -> None:
        """Keeps the prefix cache from sharing ``blocks`` any further; their owners keep them."""
        for block in blocks:
            self._index.drop(block)

    def reset_cache(self) -> None:
        """Empties the index. Owners keep their blocks."""
        self._index.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def _set_free(self, block: int) -> None:
        if block in self._index:
            self._cached[block] = None
        else:
            self._free.append(block)

    def _evict(self) -> int:
        block = next(iter(self._cached))
        del self._cached[block]
        self._index.drop(block)
        return block
