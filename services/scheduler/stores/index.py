"""The places of stores, and the blocks and states there. Pure."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from shared.wire.messages import MAX_GROUPS

FLIPPED = bytes(range(255, -1, -1))
OF_GROUPS = [bytes(each ^ group for each in range(256)) for group in range(MAX_GROUPS)]


def state_key(block_hash: bytes) -> bytes:
    """The key of the state behind a block: the bits of the block's key, flipped. Applied to it
    once more, the key of the block."""
    return block_hash.translate(FLIPPED)


def group_key(block_hash: bytes, group: int) -> bytes:
    """The key of a block in a group of layers: the one of the first group is its hash. Applied to
    it once more, the hash."""
    return block_hash.translate(OF_GROUPS[group])


class Places:
    """The ``full`` places of one size in a store by key; the store numbers them from ``first`` on.
    The first full one is overwritten first, unless it is pinned by loads under way; ``on_evict``
    gets the key and the place before. Free places in ``forgets`` have content that must not return:
    the worker has yet to clear them. A ``stale`` place may have some until the worker has cleared
    it, or written another block there; its next process has to clear it again."""

    def __init__(
        self,
        num_places: int,
        place_bytes: int,
        full: Mapping[bytes, int],
        stale: Iterable[int] = (),
        first: int = 0,
    ) -> None:
        self.num_places = num_places
        self.place_bytes = place_bytes
        self.first = first
        self.forgets = dict.fromkeys(each for each in stale if each < num_places)
        self.stale: dict[int, int | None] = {**self.forgets}  # with the step that clears it
        left = {key: place for key, place in full.items() if place not in self.forgets}
        self.full = OrderedDict(left)  # its front is removed in constant time
        self.on_evict: Callable[[bytes, int], None] | None = None
        self._pins: Counter[bytes] = Counter()
        taken = set(left.values())
        self._free = [each for each in range(num_places - 1, -1, -1) if each not in taken]

    def take(self) -> int | None:
        """Returns a place to overwrite, or None if all are pinned."""
        if not self._free:
            key = next((each for each in self.full if each not in self._pins), None)
            if key is None:
                return None
            self._free.append(self.full.pop(key))
            if self.on_evict is not None:
                self.on_evict(key, self._free[-1])
        place = self._free.pop()
        self.forgets.pop(place, None)
        return place

    def put(self, key: bytes, place: int) -> None:
        """``key`` is saved in a taken ``place``."""
        self.full[key] = place
        self.stale.pop(place, None)

    def give_back(self, place: int, is_full: bool = False) -> None:
        """A taken place is free; one that ``is_full`` is to be forgotten."""
        self._free.append(place)
        if is_full:
            self.forgets[place] = self.stale[place] = None

    def send_forgets(self, step: int, most: int) -> list[int]:
        """Returns up to ``most`` places that the plan ``step`` has the worker clear."""
        places = [*islice(self.forgets, most)]
        for place in places:
            del self.forgets[place]
            self.stale[place] = step
        return places

    def note_cleared(self, places: Iterable[int], step: int) -> None:
        """The worker has cleared the ``places`` of plan ``step``; some have become stale again."""
        for place in places:
            if self.stale.get(place) == step:
                del self.stale[place]

    def use(self, key: bytes) -> None:
        """Notes the last use of a full place."""
        self.full.move_to_end(key)

    def forget(self, key: bytes) -> None:
        """Does nothing for a key that has no full place."""
        place = self.full.pop(key, None)
        if place is not None:
            self.give_back(place, is_full=True)

    def pin(self, key: bytes) -> None:
        self._pins[key] += 1

    def unpin(self, key: bytes) -> None:
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]


class Store:
    """A store with its ``parts``: of blocks, and of states if its model has them. An ``owner``
    saves there; it has none since ``left_s``."""

    def __init__(self, name: str, parts: Sequence[Places]) -> None:
        self.name = name
        self.parts = parts
        self.owner: object = None
        self.left_s: float | None = None

    def forget_all(self) -> None:
        for part in self.parts:
            for key in [*part.full]:
                part.forget(key)


class Location:
    """The ``stores`` in one location, by name. Blocks and states that are ``saving``, to a place,
    are not there yet, and may be forgotten before: ``dropped``."""

    def __init__(self) -> None:
        self.stores: dict[str, Store] = {}
        self.saving: dict[bytes, tuple[Places, int]] = {}
        self.dropped: set[bytes] = set()

    def find(self, key: bytes) -> tuple[str, Places] | None:
        """Returns a store with the block or state, and its places."""
        for name, store in self.stores.items():
            for part in store.parts:
                if key in part.full:
                    return name, part
        return None

    def forget(self, key: bytes) -> None:
        for store in self.stores.values():
            for part in store.parts:
                part.forget(key)
        self._drop(key)

    def note_saves(
        self, saves: Mapping[bytes, tuple[Places, int]], unsaved: Container[bytes]
    ) -> None:
        """The copies to taken places are done, but for the keys ``unsaved``."""
        for key, (places, place) in saves.items():
            is_dropped = key in self.dropped
            self.end_save(key)
            if key in unsaved or is_dropped:
                places.give_back(place, is_full=is_dropped)
            else:
                places.put(key, place)

    def end_save(self, key: bytes) -> None:
        self.saving.pop(key, None)
        self.dropped.discard(key)

    def forget_all(self) -> None:
        for store in self.stores.values():
            store.forget_all()
        for key in self.saving:
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        """It may be saved already, by a worker that dies before it answers."""
        if key in self.saving:
            places, place = self.saving[key]
            places.stale[place] = None
            self.dropped.add(key)


class Found(NamedTuple):
    """The places of a store with a block or state."""

    store: str
    places: Places
    is_on_disk: bool


class Reach:
    """The locations that a worker reads: one in ``memory``, and one on a ``disk`` below if there
    is any."""

    def __init__(self, memory: Location) -> None:
        self.memory = memory
        self.disk: Location | None = None

    def find(self, key: bytes) -> Found | None:
        """In memory, if it is there."""
        if (found := self.memory.find(key)) is not None:
            return Found(*found, is_on_disk=False)
        if self.disk is not None and (found := self.disk.find(key)) is not None:
            return Found(*found, is_on_disk=True)
        return None

    def use(self, key: bytes) -> None:
        """Notes the last use of a block or state, in both."""
        for location in (self.memory, self.disk):
            if location is not None and (found := location.find(key)) is not None:
                found[1].use(key)

    def lose(self, key: bytes, *, is_on_disk: bool) -> None:
        """It could not be loaded from there."""
        location = self.disk if is_on_disk else self.memory
        if location is not None:
            location.forget(key)

    def forget(self, key: bytes) -> None:
        for location in (self.memory, self.disk):
            if location is not None:
                location.forget(key)
