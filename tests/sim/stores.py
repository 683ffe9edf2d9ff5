"""The stores of simulated workers: they outlive their workers, as files do."""

import asyncio
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from msgspec.structs import replace

from services.scheduler.stores.cell import CellStores
from services.scheduler.stores.copies import StoreCopies
from services.scheduler.stores.disk import DiskCopies
from services.scheduler.stores.index import Location, Store
from shared.link.peer import Peer
from shared.wire.kv_groups import has_windows
from shared.wire.messages import (
    DISK_STORES_MINOR,
    STORED_STATES_MINOR,
    STORED_WINDOWS_MINOR,
    STORES_MINOR,
    Capacity,
    Fetched,
)
from tests.services.scheduler.stores.storing_worker import Job, SimulatedStore
from tests.sim.adapters import AdaptingWorker
from tests.sim.virtual_loop import Process

DISK_S = 4e-3
"""Of the copies of a plan."""
MOMENT_S = 1e-6


class Folders:
    """``stores`` by name, in each of ``num_locations``, of ``num_places``, for states too if the
    model ``has_states``, and on a disk below. A process that lives keeps its store locked. Copies
    of a disk take ``disk_s``."""

    def __init__(
        self, num_locations: int, num_places: int, has_states: bool, num_on_disk: int
    ) -> None:
        self._sizes: dict[str, Any] = {"num_places": num_places, "place_bytes": 1 << 20}
        if has_states:
            self._sizes |= {"num_states": num_places // 4 + 1, "state_bytes": 1 << 20}
        self.locations: list[dict[str, SimulatedStore]] = [{} for _ in range(num_locations)]
        self._owners: dict[str, Process] = {}
        self.disks: dict[str, SimulatedStore] = {}
        self._num_on_disk = num_on_disk if num_locations else 0
        self.disk_s = DISK_S

    def open_disk(self, owner: Process) -> SimulatedStore | None:
        if not self._num_on_disk:
            return None
        sizes = {**self._sizes, "num_places": self._num_on_disk}
        return self._claim(self.disks, "disk", owner, sizes, is_disk=True)

    def open(
        self, number: int, owner: Process
    ) -> tuple[str, SimulatedStore | None, dict[str, SimulatedStore]]:
        """Returns the location of the worker ``number``, the first store there without an owner,
        and all."""
        if not self.locations:
            return "", None, {}
        index = number % len(self.locations)
        stores = self.locations[index]
        store = self._claim(stores, str(index), owner, self._sizes)
        return f"location {index}", store, stores

    def _claim(
        self,
        stores: dict[str, SimulatedStore],
        prefix: str,
        owner: Process,
        sizes: dict[str, Any],
        *,
        is_disk: bool = False,
    ) -> SimulatedStore:
        for name, store in stores.items():
            if self._owners[name].is_dead:
                store.is_down = False
                break
        else:
            name = f"{prefix}/{len(stores)}"
            store = stores[name] = SimulatedStore(name, **sizes, is_disk=is_disk)
        self._owners[name] = owner
        return store

    def damage(self, random: Random) -> None:
        for stores in (*self.locations, self.disks):
            for store in stores.values():
                store.damage(random)


class StoringService(AdaptingWorker):
    """Reports its store to each scheduler that it attaches to, if it ``speaks`` of stores, and
    answers plans with copies. It does the jobs of its disk in order, some time later."""

    def __init__(
        self,
        *arguments: Any,
        location: str,
        engine: Callable[[], Any],
        speaks: bool,
        folders: Folders,
        speaks_of_disks: bool,
    ) -> None:
        super().__init__(*arguments)
        self._folders = folders
        self._speaks_of_disks = speaks_of_disks
        self._due_s = [0.0, 0.0]  # of the last read and the last write
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
                disk = self._engine_of().disk
                is_told = self._speaks_of_disks and home.hello.minor >= DISK_STORES_MINOR
                if disk is not None and is_told:
                    self._do_later(1, home, partial(self._tell_of_disk, home, disk))

    def _tell_of_disk(self, home: Peer, disk: SimulatedStore) -> None:
        if self._attachment.home is home:
            message, arrays = disk.inventory("the disk")
            home.send(message, *arrays)

    def _do_later(self, number: int, peer: Peer, job: Job) -> None:
        loop: Any = asyncio.get_running_loop()
        delay_s = self._folders.disk_s * loop.random.uniform(0.3, 3)
        due_s = max(self._due_s[number] + MOMENT_S, loop.now_s + delay_s)
        self._due_s[number] = due_s
        worker = self._engine_of().worker
        loop.call_later(due_s - loop.now_s, self._do, peer, worker, job, delay_s)

    def _do(self, peer: Peer, worker: Any, job: Job, delay_s: float) -> None:
        """A former scheduler gets no answer."""
        message = job()
        if isinstance(message, Fetched):
            message = replace(message, fetch_s=delay_s)
        is_home = self._attachment.home is peer and self._engine_of().worker is worker
        if message is not None and is_home:
            peer.send(message)

    def _send_result(self, peer: Peer, output: Any, *arguments: Any) -> None:
        if output.exception() is None:
            copied = self._engine_of().copied.pop(output.result()[0].step, None)
            if copied is not None:
                peer.send(copied)
            worker = self._engine_of().worker
            for number, jobs in enumerate((worker.reads, worker.writes)):
                while jobs:
                    self._do_later(number, peer, jobs.popleft())
        super()._send_result(peer, output, *arguments)


def least_minor(own: SimulatedStore | None, capacity: Capacity) -> int:
    """Of peers that may know of the store."""
    if own is not None and has_windows(capacity):
        return STORED_WINDOWS_MINOR
    return STORED_STATES_MINOR if own is not None and own.num_states else STORES_MINOR


def held_by(service: Any) -> int:
    """Counts the copies that a scheduler awaits."""
    copies = [each for found in _found(service) for each in found._copies.values()]
    on_disks = sum(each.disk.num_awaited for each in copies if each.disk is not None)
    return on_disks + sum(len(each._to_load) + len(each._sent) for each in copies)


def check_stores(service: Any, folders: Folders) -> None:
    """At rest: a scheduler knows the contents of its workers' stores."""
    places = (*folders.locations, folders.disks)
    files = {name: store for stores in places for name, store in stores.items()}
    for cell in _found(service):
        for location in (*cell._memory.values(), *cell._disks.values()):
            check_location(location, files)


def check_location(location: Location, files: dict[str, SimulatedStore]) -> None:
    assert not location.saving
    for store in location.stores.values():
        assert not any(part._pins for part in store.parts)
        if isinstance(store.owner, StoreCopies | DiskCopies):
            check_store(store, files[store.name])


def check_store(store: Store, file: SimulatedStore) -> None:
    places = ((part.first, each) for part in store.parts for each in part.full.items())
    for first, (key, place) in places:
        found, _ = file.records.get(first + place, (b"", []))
        assert found == key or key in file.lost, "a scheduler and a store disagree"


def _found(service: Any) -> list[CellStores]:
    return [each for each in service._extensions if isinstance(each, CellStores)]
