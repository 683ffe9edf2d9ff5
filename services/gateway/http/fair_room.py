"""Room that owners share without parts of a fixed size. Pure."""

from collections import Counter


class FairRoom:
    """One owner has up to ``part``, and all together twice as much. An owner never gets more than
    was free, so that others find room."""

    def __init__(self, part: int) -> None:
        self.part = part
        self._held: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self._held.total()

    def held(self, owner: str) -> int:
        return self._held[owner]

    def has_room(self, owner: str, num: int) -> bool:
        return self._held[owner] + num <= min(self.part, 2 * self.part - self.total)

    def add(self, owner: str, num: int) -> None:
        """A negative number takes away."""
        self._held[owner] += num
        if not self._held[owner]:
            del self._held[owner]
