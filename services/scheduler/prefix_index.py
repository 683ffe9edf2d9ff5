"""Finds blocks of one worker by the ids they hold, so that equal prefixes are computed once. Pure.

A block's KV depends on all ids before it too, so its block hash is a chain: blake2b of the block
hash before it and its own ids, 128 bits; the first one follows the ``cache_salt``. An index belongs
to one worker, whose model never changes, and dies with it.
"""

from collections.abc import Callable
from hashlib import blake2b

HASH_BYTES = 16


class BlockHashes:
    """Computes the block hashes of a sequence, each when it is first asked for."""

    def __init__(self, block_size: int, cache_salt: str) -> None:
        self.block_size = block_size
        self._chain = [_digest(cache_salt.encode())]

    def block_hash(self, number: int, ids: Callable[[int, int], bytes]) -> bytes:
        """``ids(start, end)`` returns the int32 ids between two positions as bytes; all ids of the
        block must be known."""
        chain, size = self._chain, self.block_size
        while len(chain) <= number + 1:
            end = len(chain) * size
            chain.append(_digest(chain[-1] + ids(end - size, end)))
        return chain[number + 1]


class PrefixIndex:
    """Maps block hashes to blocks, one to one. ``holders``, which all workers' indices share, names
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
