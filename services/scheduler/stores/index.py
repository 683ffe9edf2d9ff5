"""The places of stores, and the blocks there. Pure."""

from collections import Counter, OrderedDict
from collections.abc import Mapping


class Store:
    """A store's full ``places`` by key. The first one is overwritten first, unless it is pinned by
    loads under way. Places in ``forgets`` are free, and their content must not return: the worker
    has yet to be told. An ``owner`` saves blocks in the store; it has none since ``left_s``."""

    def __init__(
        self, name: str, num_places: int, place_bytes: int, places: Mapping[bytes, int]
    ) -> None:
        self.name = name
        self.num_places = num_places
        self.place_bytes = place_bytes
        self.places = OrderedDict(places)  # its front is removed in constant time
        self.forgets: dict[int, None] = {}
        self.owner: object = None
        self.left_s: float | None = None
        self._pins: Counter[bytes] = Counter()
        taken = set(places.values())
        self._free = [each for each in range(num_places - 1, -1, -1) if each not in taken]

    def take(self) -> int | None:
        """Returns a place to overwrite, or None if all are pinned."""
        if not self._free:
            key = next((each for each in self.places if each not in self._pins), None)
            if key is None:
                return None
            self._free.append(self.places.pop(key))
        place = self._free.pop()
        self.forgets.pop(place, None)
        return place

    def put(self, key: bytes, place: int) -> None:
        """The block ``key`` is saved in a taken ``place``."""
        self.places[key] = place

    def give_back(self, place: int, is_full: bool = False) -> None:
        """A taken place is free; one that ``is_full`` is to be forgotten."""
        self._free.append(place)
        if is_full:
            self.forgets[place] = None

    def use(self, key: bytes) -> None:
        """Notes the last use of a full place."""
        self.places.move_to_end(key)

    def forget(self, key: bytes) -> None:
        """Does nothing for a key that has no full place."""
        place = self.places.pop(key, None)
        if place is not None:
            self.give_back(place, is_full=True)

    def pin(self, key: bytes) -> None:
        self._pins[key] += 1

    def unpin(self, key: bytes) -> None:
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]


class Location:
    """The ``stores`` in one location, by name. Blocks that are ``saving`` are not there yet, and
    may be forgotten before: ``dropped``."""

    def __init__(self) -> None:
        self.stores: dict[str, Store] = {}
        self.saving: set[bytes] = set()
        self.dropped: set[bytes] = set()

    def find(self, key: bytes) -> Store | None:
        """Returns a store with the block."""
        for store in self.stores.values():
            if key in store.places:
                return store
        return None

    def forget(self, key: bytes) -> None:
        for store in self.stores.values():
            store.forget(key)
        if key in self.saving:
            self.dropped.add(key)

    def forget_all(self) -> None:
        for store in self.stores.values():
            for key in [*store.places]:
                store.forget(key)
        self.dropped |= self.saving
