"""Shares of the store: how many responses and bytes each owner has. Pure."""

from collections.abc import Iterable, Iterator


class Shares:
    def __init__(self, shares: Iterable[tuple[str, int, int]]) -> None:
        """``shares``: owner, number of responses, their bytes."""
        self._shares = {owner: [num, num_bytes] for owner, num, num_bytes in shares}

    @property
    def num(self) -> int:
        return sum(num for num, _ in self._shares.values())

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self._shares.values())

    def add(self, owner: str, num: int, num_bytes: int) -> None:
        """Negative numbers take away."""
        share = self._shares.setdefault(owner, [0, 0])
        share[0] += num
        share[1] += num_bytes

    def losers(self, owner: str, limit: int, *, by_bytes: bool) -> Iterator[str]:
        """The owners that may lose a response to ``owner``, the largest share first: all with more
        than an equal part of ``limit``, and ``owner`` itself."""
        sizes = {each: share[by_bytes] for each, share in self._shares.items() if share[0]}
        for each in sorted(sizes, key=lambda each: sizes[each], reverse=True):
            if each == owner or sizes[each] * len(sizes) > limit:
                yield each
