"""Which blocks of one worker hold which ids, so that equal beginnings are computed once. Pure.

A block's KV depends on all ids before it too, so its name is a chain of hashes: blake2b of the name
of the block before it and its own ids, 128 bits; the first one follows the ``cache_salt``. An index
belongs to one worker, whose model never changes, and dies with it.
"""

from collections.abc import Callable
from hashlib import blake2b

HASH_BYTES = 16


class BlockNames:
    """The names of a sequence's full blocks, each computed once, when it is first asked for."""

    def __init__(self, block_size: int, cache_salt: str) -> None:
        self.block_size = block_size
        self._chain = [_digest(cache_salt.encode())]

    def name(self, number: int, ids: Callable[[int, int], bytes]) -> bytes:
        """``ids`` gives the int32 ids from a position to another, as bytes; those of the block must
        be known."""
        chain, size = self._chain, self.block_size
        while len(chain) <= number + 1:
            end = len(chain) * size
            chain.append(_digest(chain[-1] + ids(end - size, end)))
        return chain[number + 1]


class PrefixIndex:
    """Full blocks by their names. A block has one name at most, and a name one block."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._names

    def name(self, block: int) -> bytes | None:
        return self._names.get(block)

    def find(self, name: bytes) -> int | None:
        return self._blocks.get(name)

    def add(self, name: bytes, block: int) -> None:
        """Of two blocks with the same ids, computed side by side, the first one stays."""
        if name not in self._blocks:
            self._blocks[name] = block
            self._names[block] = name

    def drop(self, block: int) -> None:
        """Ignored for a block that is not here."""
        name = self._names.pop(block, None)
        if name is not None:
            del self._blocks[name]

    def clear(self) -> None:
        self._blocks.clear()
        self._names.clear()


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=HASH_BYTES).digest()
