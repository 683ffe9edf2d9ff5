"""KV blocks of one worker: their owners, and the prefixes they hold. Pure."""

from array import array
from collections.abc import Callable
from hashlib import blake2b

HASH_BYTES = 16


class BlockHashes:
    """Computes the block hashes of a sequence, each when it is first asked for.

    A block's KV depends on all ids before it too, so its hash is a chain: blake2b, 128 bits, of the
    hash before it and its own ids; the first one follows the ``root`` (``hash_root``)."""

    def __init__(self, block_size: int, root: bytes) -> None:
        self.block_size = block_size
        self._chain = [root]

    def block_hash(self, number: int, ids: Callable[[int, int], bytes]) -> bytes:
        """``ids(start, end)`` returns the int32 ids between two positions as bytes; all ids of the
        block must be known."""
        chain, size = self._chain, self.block_size
        while len(chain) <= number + 1:
            end = len(chain) * size
            chain.append(_digest(chain[-1] + ids(end - size, end)))
        return chain[number + 1]


class PrefixIndex:
    """Maps block hashes of one worker to blocks, one to one, so that equal prefixes are computed
    once. ``holders``, which all workers' indices share, names
    for each hash the worker that was the last to add it, and none once that has dropped it."""

    def __init__(self, worker_id: str, holders: dict[bytes, str]) -> None:
        self._worker_id = worker_id
        self._holders = holders
        self._blocks: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._hashes

    def block_hash(self, block: int) -> bytes | None:
        return self._hashes.get(block)

    def find(self, block_hash: bytes) -> int | None:
        return self._blocks.get(block_hash)

    def add(self, block_hash: bytes, block: int) -> None:
        """Ignored where another block with the same ids, computed beside it, was added first."""
        if block_hash not in self._blocks:
            self._blocks[block_hash] = block
            self._hashes[block] = block_hash
            self._holders[block_hash] = self._worker_id

    def drop(self, block: int) -> None:
        """Ignored for a block that is not here."""
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
