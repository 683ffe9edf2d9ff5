"""Blocks, or states, that wait for a place in their worker's store. Pure."""

from collections.abc import Iterator

from services.scheduler.block_pool import BlockPool, KeepPoint, PrefixIndex
from services.scheduler.stores.index import Location, Places

MAX_COPY_BYTES = 16 << 20
"""Of the loads of a plan, and of its saves of one kind: other sequences wait meanwhile. Chosen."""
MAX_COPIES = 256  # rows of a plan


class Saves:
    """Of a worker with ``pool`` and ``index``, and with ``num`` blocks or copies of states."""

    def __init__(self, places: Places, pool: BlockPool, index: PrefixIndex, num: int) -> None:
        self.places = places
        self._pool, self._index = pool, index
        self._most = 2 * num
        self._waiting: dict[bytes, tuple[int, KeepPoint | None]] = {}  # oldest first

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, key: bytes, number: int, point: KeepPoint | None = None) -> None:
        """A block of the index, or a block or a copy of ``point``."""
        self._waiting[key] = number, point
        if len(self._waiting) > self._most:
            self._waiting = {
                key: each for key, each in self._waiting.items() if self._is_there(key, *each)
            }

    def clear(self) -> None:
        self._waiting.clear()

    def take(self, location: Location) -> Iterator[tuple[bytes, int, int]]:
        """Yields key, number and a taken place of what the next plan saves: all that the worker
        still has, and no store of the location."""
        num_left = max(1, min(MAX_COPIES, MAX_COPY_BYTES // max(1, self.places.place_bytes)))
        while self._waiting and num_left:
            key, (number, point) = next(iter(self._waiting.items()))
            is_known = key in location.saving or location.find(key) is not None
            if is_known or not self._is_there(key, number, point):
                del self._waiting[key]
                continue
            place = self.places.take()
            if place is None:
                break
            del self._waiting[key]
            location.saving[key] = self.places, place
            num_left -= 1
            yield key, number, place

    def _is_there(self, key: bytes, number: int, point: KeepPoint | None) -> bool:
        if point is None:
            return self._index.find(key) == number
        return self._pool.keep_points.get(point.block_hash) is point
