"""Blocks, or states, that wait for a place in their worker's store. Pure."""

from collections.abc import Callable, Iterator

from services.scheduler.stores.index import Location, Places

MAX_COPY_BYTES = 16 << 20
"""Of the loads of a plan, and of its saves of one kind: other sequences wait meanwhile. Chosen."""
MAX_COPIES = 256  # rows of a plan


class Saves:
    """``find`` returns the worker's block of a key, or its copy of a state; it has ``num``."""

    def __init__(self, places: Places, find: Callable[[bytes], int | None], num: int) -> None:
        self.places = places
        self._find = find
        self._most = 2 * num
        self._waiting: dict[bytes, int] = {}  # oldest first

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, key: bytes, number: int) -> None:
        self._waiting[key] = number
        if len(self._waiting) > self._most:
            found = {key: each for key, each in self._waiting.items() if self._find(key) == each}
            self._waiting = found

    def clear(self) -> None:
        self._waiting.clear()

    def take(self, location: Location) -> Iterator[tuple[bytes, int, int]]:
        """Yields key, number and a taken place of what the next plan saves: all that the worker
        still has, and no store of the location."""
        num_left = max(1, min(MAX_COPIES, MAX_COPY_BYTES // max(1, self.places.place_bytes)))
        while self._waiting and num_left:
            key, number = next(iter(self._waiting.items()))
            is_known = key in location.saving or location.find(key) is not None
            if is_known or self._find(key) != number:
                del self._waiting[key]
                continue
            place = self.places.take()
            if place is None:
                break
            del self._waiting[key]
            location.saving.add(key)
            num_left -= 1
            yield key, number, place
