"""The stores of a cell's workers, which outlive them."""

from collections.abc import Sequence as Series

import numpy as np
from prometheus_client import Gauge

from services.scheduler.extension import Cell, CellExtension
from services.scheduler.sequence import Sequence, WaitReason
from services.scheduler.stores.copies import StoreCopies
from services.scheduler.stores.index import Location, Places, Store
from shared.errors import CodecError
from shared.link.peer import Peer
from shared.wire.codec import Array
from shared.wire.messages import (
    FIRST_STATE,
    Capacity,
    Copied,
    Fetched,
    Inventory,
    Message,
    Spilled,
)

KEPT_S = 600.0
"""Time without an owner, after which a store is forgotten. Its owner may still bring it back."""
MAX_KEPT = 16  # stores without owners

PLACES = Gauge(
    "shoal_kv_store_places", "Places for KV blocks and states in stores", ["medium", "state"]
)


class CellStores(CellExtension):
    """Workers find blocks in all stores of their location, also of lost workers."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._memory: dict[str, Location] = {}
        self._disks: dict[str, Location] = {}
        self._copies: dict[Peer, StoreCopies] = {}  # of attached workers

    def takes(self, peer: Peer, message: Message, arrays: Series[Array] = ()) -> bool:
        if peer.hello.service != "worker":
            return False
        match message:
            case Inventory(is_on_disk=False):
                self._begin(peer, message, *arrays)
            case Inventory():
                self._add_disk(peer, message, *arrays)
            case Copied():
                self._copies_of(peer).note(message)
            case Fetched():
                self._copies_of(peer).note_fetched(message)
            case Spilled():
                self._copies_of(peer).note_spilled(message)
            case _:
                return False
        return True

    def _copies_of(self, worker: Peer) -> StoreCopies:
        if worker not in self._copies:
            raise CodecError("copies without an Inventory")
        return self._copies[worker]

    def on_detach(self, worker: Peer) -> None:
        if (copies := self._copies.pop(worker, None)) is not None:
            copies.close()

    def reset_prefix_cache(self) -> None:
        for location in (*self._memory.values(), *self._disks.values()):
            location.forget_all()
        for copies in self._copies.values():
            copies.reset()

    def look(self, now_s: float) -> None:
        self._drop_old(now_s)
        for medium, locations in (("memory", self._memory), ("disk", self._disks)):
            stores = [each for every in locations.values() for each in every.stores.values()]
            parts = [part for each in stores for part in each.parts]
            num_full = sum(len(each.full) for each in parts)
            PLACES.labels(medium, "full").set(num_full)
            num_free = sum(each.num_places for each in parts) - num_full
            PLACES.labels(medium, "free").set(num_free)

    def _begin(self, worker: Peer, inventory: Inventory, keys: np.ndarray, places: Array) -> None:
        worker_id = self._cell.id_of(worker)
        if worker_id is None or worker in self._copies:
            raise CodecError("an Inventory of a worker that is not attached, or has sent one")
        store = self._store_of(worker, inventory, keys, places)
        if not self._cell.config.enable_prefix_caching:
            return
        location = self._put(self._memory, inventory.location, store)
        state = self._cell.core.workers[worker_id]

        def put_back(sequence: Sequence) -> None:
            state.remove(sequence)
            self._cell.core.queues.put_back(sequence, WaitReason.LOADING)

        self._copies[worker] = StoreCopies(state, location, store, put_back)

    def _add_disk(
        self, worker: Peer, inventory: Inventory, keys: np.ndarray, places: Array
    ) -> None:
        if not self._cell.config.enable_prefix_caching:
            return
        copies = self._copies_of(worker)
        store = self._store_of(worker, inventory, keys, places)
        sizes = [each.place_bytes for each in copies.store.parts]
        if copies.disk is not None or [each.place_bytes for each in store.parts] != sizes:
            raise CodecError("a second store on a disk, or one with places of another size")
        location = self._put(self._disks, inventory.location, store)
        copies.add_disk(location, store)

    def _store_of(
        self, worker: Peer, inventory: Inventory, keys: np.ndarray, places: Array
    ) -> Store:
        full = _checked(inventory, keys, places)
        capacity = worker.hello.capacity
        assert capacity is not None
        _check_capacity(capacity, inventory)
        before = self._taken_out(inventory.store)
        return Store(inventory.store, _parts(inventory, full, before))

    def _put(self, locations: dict[str, Location], name: str, store: Store) -> Location:
        location = locations.setdefault(name, Location())
        location.stores[store.name] = store
        return location

    def _taken_out(self, name: str) -> Store | None:
        """The store as it was known; its owner may be a process before this one."""
        for location in (*self._memory.values(), *self._disks.values()):
            if (store := location.stores.pop(name, None)) is not None:
                store.owner = None
                return store
        return None

    def _drop_old(self, now_s: float) -> None:
        """Drops stores that nobody has owned for long, and the first ones beyond the limit."""
        left: list[tuple[float, Location, Store]] = []
        for location in (*self._memory.values(), *self._disks.values()):
            for store in location.stores.values():
                if store.owner is not None:
                    store.left_s = None
                    continue
                if store.left_s is None:
                    store.left_s = now_s
                left.append((store.left_s, location, store))
        left.sort(key=lambda each: -each[0])
        for number, (left_s, location, store) in enumerate(left):
            if number >= MAX_KEPT or now_s - left_s >= KEPT_S:
                del location.stores[store.name]
        reaches = [each.reach for each in self._copies.values()]
        used = {each for reach in reaches for each in (reach.memory, reach.disk)}
        self._memory = {
            key: each for key, each in self._memory.items() if each.stores or each in used
        }
        self._disks = {
            key: each for key, each in self._disks.items() if each.stores or each in used
        }


def _checked(inventory: Inventory, keys: np.ndarray, places: np.ndarray) -> dict[bytes, int]:
    """Returns the place of each key. Raises CodecError for places that no store has."""
    if len(keys) != 16 * len(places):
        raise CodecError(f"{len(places)} places with {len(keys)} bytes of keys")
    num_blocks, num_states = inventory.num_places, inventory.num_states
    of_states = places - np.int64(FIRST_STATE)
    is_there = (places >= 0) & (places < num_blocks) | (of_states >= 0) & (of_states < num_states)
    if not is_there.all():
        raise CodecError(f"a place beyond the {num_blocks} and {num_states} of the store")
    content = keys.tobytes()
    found = {
        content[16 * number : 16 * number + 16]: place
        for number, place in enumerate(places.tolist())
    }
    if len({*found.values()}) < len(places):
        raise CodecError("two full places are one, or have one key")
    return found


def _parts(inventory: Inventory, full: dict[bytes, int], before: Store | None) -> list[Places]:
    """The places of blocks, and of states if there are any. Places with content that ``before`` was
    to forget are free."""
    sizes = [(0, inventory.num_places, inventory.place_bytes)]
    if inventory.num_states:
        sizes.append((FIRST_STATE, inventory.num_states, inventory.state_bytes))
    parts = []
    for number, (first, num_places, place_bytes) in enumerate(sizes):
        mine = {
            key: place - first for key, place in full.items() if first <= place < first + num_places
        }
        stale = before.parts[number].stale if before and number < len(before.parts) else ()
        parts.append(Places(num_places, place_bytes, mine, stale, first))
    return parts


def _check_capacity(capacity: Capacity, inventory: Inventory) -> None:
    if capacity.num_stages > 1:
        raise CodecError(f"a store of a worker with {capacity.num_stages} stages")
    if (capacity.num_states is None) != (inventory.num_states == 0):
        raise CodecError(
            f"a store with {inventory.num_states} places for states; the worker has"
            f" {capacity.num_states} copies of them"
        )
