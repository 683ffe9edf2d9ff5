"""The pixels of prompts that are not sent yet. Pure."""

from collections import Counter
from collections.abc import Hashable

from shared.errors import RETRY_AFTER_S, Unavailable


class PixelMemory:
    """At most ``max_bytes``, equal images once."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._holds: Counter[Hashable] = Counter()

    def take(self, name: Hashable, num_bytes: int) -> None:
        """Raises Unavailable."""
        if not self._holds[name]:
            if (wanted := self.num_bytes + num_bytes) > self._max_bytes:
                raise Unavailable(
                    f"the images of prompts that wait in this tokenizer would have {wanted} bytes"
                    f" of pixels; the limit is {self._max_bytes}",
                    code="media_memory_full",
                    retry_after_s=RETRY_AFTER_S,
                )
            self.num_bytes += num_bytes
        self._holds[name] += 1

    def give_back(self, name: Hashable, num_bytes: int) -> None:
        self._holds[name] -= 1
        if not self._holds[name]:
            del self._holds[name]
            self.num_bytes -= num_bytes


class Hold:
    """The part of one prompt. Nothing is added after its end, when a reading may still go on."""

    def __init__(self, memory: PixelMemory) -> None:
        self._memory = memory
        self._images: list[tuple[Hashable, int]] = []
        self._is_over = False

    def add(self, name: Hashable, num_bytes: int) -> None:
        """Raises Unavailable."""
        if self._is_over:
            return
        self._memory.take(name, num_bytes)
        self._images.append((name, num_bytes))

    def end(self) -> None:
        self._is_over = True
        while self._images:
            self._memory.give_back(*self._images.pop())
