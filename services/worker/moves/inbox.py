"""Blocks that other workers have pushed, until plans name them."""

from collections import deque
from collections.abc import Sequence

from shared.errors import CodecError
from shared.wire.codec import Array


class Inbox:
    """Up to ``num_blocks`` blocks for the plans of one scheduler. On the event loop, except
    ``next_taken``.

    A block leaves its place when a plan is checked. Plans then find the taken blocks in the order
    of their rows, since each checked plan is run, or is the last one of its scheduler.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks, self.block_bytes = num_blocks, block_bytes
        self._num_expected = 0
        self._blocks: dict[bytes, Array] = {}
        self._taken: deque[Array] = deque()

    def __len__(self) -> int:
        return len(self._blocks)

    def expect(self, num: int) -> None:
        """Keeps ``num`` places for blocks that are on their way. Raises CodecError without room."""
        num_free = self.num_blocks - len(self._blocks) - self._num_expected
        if num > num_free:
            raise CodecError(f"{num} blocks for an inbox with {num_free} free places")
        self._num_expected += num

    def refuse(self, num: int) -> None:
        """``num`` of the expected blocks do not come."""
        self._num_expected -= num

    def put(self, keys: Sequence[bytes], blocks: Sequence[Array]) -> None:
        """The expected ``blocks`` have come. Blocks of one key are equal."""
        self._num_expected -= len(keys)
        self._blocks.update(zip(keys, blocks, strict=True))

    def take(self, key: bytes) -> None:
        """A later ``next_taken`` returns the block ``key``. Raises CodecError if it is not here."""
        if key not in self._blocks:
            raise CodecError(f"no block {key.hex()} is in the inbox")
        self._taken.append(self._blocks.pop(key))

    def discard(self, key: bytes) -> None:
        """It may be gone: a second arrival of a key adds nothing."""
        self._blocks.pop(key, None)

    def next_taken(self) -> Array:
        """On any one thread."""
        return self._taken.popleft()
