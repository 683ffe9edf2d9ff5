"""Blocks that other workers have pushed, until plans name them."""

from collections import deque
from collections.abc import Sequence

from shared.errors import CodecError
from shared.wire.codec import Array


class Inbox:
    """Up to ``num_blocks`` blocks for the plans of one scheduler, and up to ``num_guests`` more
    from other cells. On the event loop, except ``next_taken``.

    A block leaves its place when a plan is checked. Plans then find the taken blocks in the order
    of their rows, since each checked plan is run, or is the last one of its scheduler.
    """

    def __init__(self, num_blocks: int, block_bytes: int, num_guests: int = 0) -> None:
        self.num_blocks, self.block_bytes = num_blocks, block_bytes
        self.num_guests = num_guests
        self._num_expected = self._num_guests_expected = 0
        self._blocks: dict[bytes, Array] = {}
        self._origins: dict[bytes, set[str]] = {}  # of guests
        self._taken: deque[Array] = deque()

    def __len__(self) -> int:
        return len(self._blocks)

    def expect(self, num: int) -> None:
        """Keeps ``num`` places for blocks that are on their way. Raises CodecError without room."""
        num_own = len(self._blocks) - len(self._origins)
        num_free = self.num_blocks - num_own - self._num_expected
        if num > num_free:
            raise CodecError(f"{num} blocks for an inbox with {num_free} free places")
        self._num_expected += num

    def may_expect_guests(self, num: int) -> bool:
        """Keeps ``num`` places for guests; False without room, as no scheduler counts them."""
        if num > self.num_guests - len(self._origins) - self._num_guests_expected:
            return False
        self._num_guests_expected += num
        return True

    def refuse(self, num: int, are_guests: bool = False) -> None:
        """``num`` of the expected blocks do not come."""
        if are_guests:
            self._num_guests_expected -= num
        else:
            self._num_expected -= num

    def put(self, keys: Sequence[bytes], blocks: Sequence[Array], origin: str = "") -> None:
        """The expected ``blocks`` have come, guests from the scheduler ``origin``. Blocks of one
        key are equal."""
        self.refuse(len(keys), bool(origin))
        self._blocks.update(zip(keys, blocks, strict=True))
        for key in keys if origin else ():
            self._origins.setdefault(key, set()).add(origin)

    def take(self, key: bytes) -> set[str]:
        """A later ``next_taken`` returns the block ``key``. Returns the origins of a guest. Raises
        CodecError if the block is not here."""
        if key not in self._blocks:
            raise CodecError(f"no block {key.hex()} is in the inbox")
        self._taken.append(self._blocks.pop(key))
        return self._origins.pop(key, set())

    def discard(self, key: bytes) -> set[str]:
        """Returns the origins of a guest. The block may be gone: a second arrival of a key adds
        nothing."""
        self._blocks.pop(key, None)
        return self._origins.pop(key, set())

    def next_taken(self) -> Array:
        """On any one thread."""
        return self._taken.popleft()
