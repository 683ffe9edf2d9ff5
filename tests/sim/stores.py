"""The stores of simulated workers: they outlive their workers, as files do."""

from collections.abc import Callable
from random import Random
from typing import Any

from services.scheduler.stores.cell import CellStores
from services.scheduler.stores.copies import StoreCopies
from services.scheduler.stores.index import Store
from shared.link.peer import Peer
from shared.wire.kv_groups import has_windows
from shared.wire.messages import (
    STORED_STATES_MINOR,
    STORED_WINDOWS_MINOR,
    STORES_MINOR,
    Capacity,
)
from tests.services.scheduler.stores.storing_worker import SimulatedStore
from tests.sim.adapters import AdaptingWorker
from tests.sim.virtual_loop import Process


class Folders:
    """``stores`` by name, in each of ``num_locations``, of ``num_places``, for states too if the
    model ``has_states``. A process that lives keeps its store locked."""

    def __init__(self, num_locations: int, num_places: int, has_states: bool) -> None:
        self._sizes: dict[str, Any] = {"num_places": num_places, "place_bytes": 1 << 20}
        if has_states:
            self._sizes |= {"num_states": num_places // 4 + 1, "state_bytes": 1 << 20}
        self.locations: list[dict[str, SimulatedStore]] = [{} for _ in range(num_locations)]
        self._owners: dict[str, Process] = {}

    def open(
        self, number: int, owner: Process
    ) -> tuple[str, SimulatedStore | None, dict[str, SimulatedStore]]:
        """Returns the location of the worker ``number``, the first store there without an owner,
        and all."""
        if not self.locations:
            return "", None, {}
        index = number % len(self.locations)
        stores = self.locations[index]
        for name, store in stores.items():
            if self._owners[name].is_dead:
                store.is_down = False
                break
        else:
            name = f"{index}/{len(stores)}"
            store = stores[name] = SimulatedStore(name, **self._sizes)
        self._owners[name] = owner
        return f"location {index}", store, stores

    def damage(self, random: Random) -> None:
        for stores in self.locations:
            for store in stores.values():
                store.damage(random)


class StoringService(AdaptingWorker):
    """Reports its store to each scheduler that it attaches to, if it ``speaks`` of stores, and
    answers plans with copies."""

    def __init__(
        self, *arguments: Any, location: str, engine: Callable[[], Any], speaks: bool
    ) -> None:
        super().__init__(*arguments)
        self._location = location
        self._engine_of = engine
        self._speaks = speaks
        self._told: Peer | None = None

    def _forget_sequences(self) -> None:
        super()._forget_sequences()
        self._told = None

    def _attach(self) -> None:
        super()._attach()
        home, own = self._attachment.home, self._engine_of().own
        if home is not None and home is not self._told and own is not None:
            self._told, capacity = home, self._engine_of().capacity
            if self._speaks and home.hello.minor >= least_minor(own, capacity):
                message, arrays = own.inventory(self._location)
                home.send(message, *arrays)

    def _send_result(self, peer: Peer, output: Any, *arguments: Any) -> None:
        if output.exception() is None:
            copied = self._engine_of().copied.pop(output.result()[0].step, None)
            if copied is not None:
                peer.send(copied)
        super()._send_result(peer, output, *arguments)


def least_minor(own: SimulatedStore | None, capacity: Capacity) -> int:
    """Of peers that may know of the store."""
    if own is not None and has_windows(capacity):
        return STORED_WINDOWS_MINOR
    return STORED_STATES_MINOR if own is not None and own.num_states else STORES_MINOR


def held_by(service: Any) -> int:
    """Counts the copies that a scheduler awaits."""
    copies = (each for found in _found(service) for each in found._copies.values())
    return sum(len(each._to_load) + len(each._sent) for each in copies)


def check_stores(service: Any, folders: Folders) -> None:
    """At rest: a scheduler knows the contents of its workers' stores."""
    files = {name: store for stores in folders.locations for name, store in stores.items()}
    for cell in _found(service):
        for location in cell._locations.values():
            assert not location.saving
            for store in location.stores.values():
                assert not any(part._pins for part in store.parts)
                if isinstance(store.owner, StoreCopies):
                    check_store(store, files[store.name])


def check_store(store: Store, file: SimulatedStore) -> None:
    places = ((part.first, each) for part in store.parts for each in part.full.items())
    for first, (key, place) in places:
        found, _ = file.records.get(first + place, (b"", []))
        assert found == key or key in file.lost, "a scheduler and a store disagree"


def _found(service: Any) -> list[CellStores]:
    return [each for each in service._extensions if isinstance(each, CellStores)]
